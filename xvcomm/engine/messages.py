"""Point-to-point messages: enqueued in order on the rings, then waited for or left to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from xvcomm.abc.device import RingStalled, RingStopped, Stream
from xvcomm.abc.message_mover import MessageMover
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.request import MessageRequest
from xvcomm.engine.session.rings import Use
from xvcomm.memory.ring import RingEnd
from xvcomm.system.forking import ProcessFuture
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import State
from xvcomm.trace.operation import Operation
from xvcomm.types.opcode import OpCode

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

# Looked up once: members of enumerations take longer to find than the rest of some lines below.
_SEND, _P2P = OpCode.SEND, Use.POINT_TO_POINT
_INSIDE = 2  # functions of xvcomm that are under way when `run_alone` asks for the call site


class Messages(ABC):
    """Moves the messages of one communicator."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Streams that no call uses at the moment: each takes one for itself, so that threads do not wait for another.
        self._free: list[Stream] = []

    @abstractmethod
    def run_alone(self, t: MessageRequest) -> None:
        """`run` for one message, the usual case."""

    @abstractmethod
    def run(self, transfers: Sequence[MessageRequest]) -> None:
        """Move messages at the same time; returns when their arrays may be used."""

    def work(self, t: MessageRequest) -> Work:
        """The Work of a message that will be started or given up."""
        t.work = work = Work(t)
        return work

    def start_alone(self, t: MessageRequest) -> Work:
        """Move one message without waiting for it; gives its Work."""
        work = self.work(t)
        self.start([t])
        return work

    @abstractmethod
    def start(self, transfers: Sequence[MessageRequest]) -> None:
        """Move messages of one channel at the same time, without waiting for them; each has a Work."""

    def start_group(self, transfers: Sequence[MessageRequest]) -> None:
        """`start` for messages of any channels: none of them waits for another channel's, and nor does its Work."""
        channels: dict[int, list[MessageRequest]] = {}
        for t in transfers:
            channels.setdefault(t.channel, []).append(t)
        parts = list(channels.values())
        for number, part in enumerate(parts):
            try:
                self.start(part)
            except BaseException as error:
                for later in parts[number + 1 :]:
                    self.give_up(later, error)
                raise

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[MessageRequest, MessageRequest]], *, waits: bool) -> None:
        """Copy messages of this rank to itself, each a pair of send and receive. They have Works if `waits` is False."""

    def give_up(self, transfers: Sequence[MessageRequest], error: BaseException) -> None:
        """Give the Works of messages that will never move the error to raise."""
        for t in transfers:
            if t.work is not None:
                t.work.give_up(error)
                t.work = None

    @abstractmethod
    def settle(self, peers: Collection[int], channel: int) -> None:
        """Launch all posted receives of a channel, so that a following probe does not see their messages."""

    def _take_stream(self) -> Stream:
        try:
            return self._free.pop()
        except IndexError:
            return self._context.device.streams(1)[0]

    def _begin(self, t: MessageRequest) -> RingEnd:
        """Begin the operation of one message; gives its ring end."""
        self._note(t)
        end = t.end = self._context.rings.end(t.peer, _P2P, t.deadline, producer=t.name is _SEND, channel=t.channel)
        return end

    def _note(self, t: MessageRequest) -> Operation:
        """Begin the operation of one message, which has no ring if it is to this rank itself."""
        operation = t.operation = self._context.begin(t.name, t.message(), t.peer, t.call_site)
        operation.channel = t.channel
        return operation

    def _enqueue(self, t: MessageRequest, stream: Stream) -> RingEnd:
        """Enqueue one message on a stream, and begin its operation if needed; the caller holds `Context.enqueueing`."""
        end = t.end if t.end is not None else self._begin(t)
        assert t.operation is not None
        device = self._context.device
        move = device.put if end.producer else device.get
        move(end, t.view.address, t.operation.message, stream)
        return end

    def _fail(self, transfers: Sequence[MessageRequest], error: BaseException) -> NoReturn:
        """Raise the user's error, and give it to the Works."""
        failed_ends = (
            (error.end,) if isinstance(error, RingStopped) else error.ends if isinstance(error, RingStalled) else ()
        )
        begun = [t for t in transfers if t.operation is not None]
        failed = next((t for t in begun if t.end in failed_ends), begun[0] if begun else None)
        try:
            if failed is None or failed.operation is None:
                raise error
            self._context.fail(error, failed.operation)
        except BaseException as raised:
            for t in begun:
                if t is not failed and t.operation is not None:
                    self._context.end(t.operation, State.FAILED)
            self.give_up(transfers, raised)
            raise


class HostMessages(Messages):
    """On host memory the thread that waits for a message moves it, and a thread of the device moves the others."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Message movers that no call uses at the moment, for each direction, peer and channel.
        self._message_movers: dict[tuple[OpCode, int, int], list[MessageMover]] = defaultdict(list)

    def run_alone(self, t: MessageRequest) -> None:
        """See `Messages.run_alone`; by message mover, but the first message of a ring end, which makes it."""
        context, view, message_movers = self._context, t.view, self._message_movers[t.name, t.peer, t.channel]
        if not message_movers:
            self.run([t])
            assert t.end is not None
            made = context.message_mover(t.end, t.name) if context.launches.enabled else None
            if made is not None:
                message_movers.append(made)
            return
        message_mover = message_movers.pop()
        call_site = t.call_site or find_call_site(_INSIDE)
        try:
            context.lifecycle.enter(message_mover, t.name)
            if not message_mover.begin(context.sequence, view.address, view.dtype.code, view.nbytes, t.tag, call_site):
                message_mover.finish(t.deadline)
        except BaseException as error:
            self._lose(t, message_mover, error)
        context.moved(message_mover)
        message_movers.append(message_mover)

    def _lose(self, t: MessageRequest, message_mover: MessageMover, error: BaseException) -> NoReturn:
        """Raise the user's error when a message mover was stopped, or interrupted."""
        if not message_mover.discard():
            self._context.lifecycle.users.discard(message_mover)
            raise error
        t.end = message_mover.end
        t.operation = self._context.replace(message_mover, t.name, t.message(), t.peer)
        t.operation.channel = t.channel
        self._fail([t], error)

    def run(self, transfers: Sequence[MessageRequest]) -> None:
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            stream.synchronize()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._free.append(stream)
        self._complete(transfers)

    def work(self, t: MessageRequest) -> Work:
        t.work = work = Work(t, future=ProcessFuture())
        return work

    def start(self, transfers: Sequence[MessageRequest]) -> None:
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            pending = stream.flush()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._free.append(stream)
        if isinstance(pending, ProcessFuture):
            for t in transfers:
                if t.work is not None and isinstance(t.work.future, ProcessFuture):
                    t.work.future.help = pending.help
        pending.add_done_callback(lambda done: self._end(transfers, done.exception()))

    def copy(self, pairs: Sequence[tuple[MessageRequest, MessageRequest]], *, waits: bool) -> None:
        for pair in pairs:
            sent, received = pair
            stream = self._take_stream()
            try:
                for t in pair:
                    self._note(t)
                self._context.device.copy(received.view.address, sent.view.address, sent.view.nbytes, stream)
                stream.synchronize()
            except BaseException as error:
                stream.discard()
                self._fail(pair, error)
            self._free.append(stream)
            self._complete(pair)

    def settle(self, peers: Collection[int], channel: int) -> None:
        """See `Messages.settle`: they are counted when they are posted."""

    def _enqueue_all(self, transfers: Sequence[MessageRequest], stream: Stream) -> None:
        stream.deadline = min((t.deadline for t in transfers), key=lambda d: d.at)
        with self._context.enqueueing:
            for t in transfers:
                self._enqueue(t, stream)

    def _end(self, transfers: Sequence[MessageRequest], error: BaseException | None) -> None:
        """End messages; runs on the thread that has moved them."""
        try:
            if error is None:
                self._complete(transfers)
            else:
                self._fail(transfers, error)
        except BaseException as raised:
            self.give_up(transfers, raised)

    def _complete(self, transfers: Sequence[MessageRequest]) -> None:
        for t in transfers:
            assert t.operation is not None
            self._context.end(t.operation)
        for t in transfers:
            if t.work is not None:
                t.work.complete()
                t.work = None
