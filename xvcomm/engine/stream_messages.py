"""Point-to-point messages on a device whose streams run asynchronously to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from xvcomm.abc.device import Event, Stream
from xvcomm.abc.launch import MessageForm, SupportsEnqueuedEvents, SupportsEnqueuedMessages
from xvcomm.engine.branch import Branch, Launched
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.admission import AdmissionQueue, Start
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.log import Ends
from xvcomm.engine.inflight.tracker import Tracked
from xvcomm.engine.inflight.work import Completion
from xvcomm.engine.launch import EnqueuedOperation, EnqueuedStep, Launch
from xvcomm.engine.messages import Messages
from xvcomm.engine.request import MessageRequest
from xvcomm.memory import array
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import Stage
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

_INSIDE, _INSIDE_START = 2, 3
"""Functions of xvcomm that are under way when `run_alone` and `run`, or `start_alone`, ask for the call site."""
_RING_STREAMS = 64
"""Rings, and sets of them, that keep a stream: a device has only so many that were made before anything ran."""


class StreamMessages(Messages):
    """Blocking messages run on their arrays' stream, asynchronous ones through the admission queue on a stream of xvcomm's."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of_rings: dict[frozenset[RingEnd], Stream] = {}
        self._branches: dict[frozenset[RingEnd], Branch] = {}
        self._launch_gate = LaunchGate(context, context.enqueueing)
        self._find: Callable[[Hashable], Launch | None] = context.launches.find
        self._admission = AdmissionQueue(context.tracker, self._go)
        context.stages.append(self._stages)
        context.lifecycle.on_close(self._admission.close)

    def run_alone(self, t: MessageRequest) -> None:
        view, handle, key, launch = t.view, t.stream, (t.shape(),), None
        ordered = handle is not None and not view.staged
        if handle is not None and ordered:
            launch = self._find(key)
            if launch is not None and not self._admission:
                if view.count and not view.trusted:
                    self._context.device.adopt(handle, view.address)
                call_site = t.call_site or find_call_site(_INSIDE)
                if launch.run(handle, t.deadline.at, call_site, items=[view.address, 0, t.tag, 0]):
                    return
        self._run([t])
        if ordered and launch is None:
            self._prepare([t], key)

    def run(self, transfers: Sequence[MessageRequest]) -> None:
        """See `Messages.run`; the host waits if an array's stream is unknown, and for results in temporary memory."""
        if len(transfers) == 1:
            self.run_alone(transfers[0])
            return
        handle, key, launch = transfers[0].stream, _key(transfers), None
        ordered = handle is not None and all(t.stream == handle and not t.view.staged for t in transfers)
        if handle is not None and ordered:
            launch = self._find(key)
            if launch is not None and not self._admission:
                self._check(transfers, handle)
                call_site = transfers[0].call_site or find_call_site(_INSIDE)
                if launch.run(handle, _soonest(transfers).at, call_site, items=_items(transfers)):
                    return
        self._run(transfers)
        if ordered and launch is None and len({t.channel for t in transfers}) == 1:
            self._prepare(transfers, key)

    def _stages(self) -> dict[int, Stage]:
        return {t.operation.record: Stage.HELD for t in self._admission.held() if t.operation is not None}

    def _make_way(self, ends: Collection[RingEnd], deadline: Deadline, user: Stream) -> None:
        """Launch queued messages of these rings first; before a capture at once."""
        if user.capturing():
            self._admission.let_go(ends)
        else:
            self._admission.come_next(ends, deadline)

    def _prepare(self, transfers: Sequence[MessageRequest], key: Hashable) -> None:
        """Let compiled code launch further messages of these shapes, if the device supports it."""
        self._context.launches.prepare(key, partial(self._compile, transfers))

    def _compile(self, transfers: Sequence[MessageRequest]) -> Launch | None:
        """The compiled launch of messages that have run, each through a ring end of its own; None if there is none."""
        device = self._context.device
        ends = [t.end for t in transfers if t.end is not None]
        if not isinstance(device, SupportsEnqueuedMessages) or len(set(ends)) < len(transfers):
            return None
        messages = [t.message()._replace(tag=0) for t in transfers]
        found = device.enqueued_messages([MessageForm(*form) for form in zip(ends, messages, strict=True)])
        if found is None:
            return None
        self._launch_gate.admit(transfers[0].name)
        names = [t.name for t in transfers]
        operations = [EnqueuedOperation(*operation) for operation in zip(names, messages, ends, strict=True)]
        return Launch(self._context, self._launch_gate, operations, [EnqueuedStep(found, rings=ends)])

    def _run(self, transfers: Sequence[MessageRequest]) -> None:
        """Enqueue messages on one of their arrays' streams, ordered with the other arrays' streams."""
        user, *others = self._streams(transfers)
        self._begin_all(transfers)
        ends, deadline, waiting = _ends(transfers), _soonest(transfers), bool(self._admission)
        if waiting:
            self._make_way(ends, deadline, user)
        for other in others:
            user.wait(other.record_event())
        self._context.tracker.seal_if_deadline_differs(transfers[0].stream or 0, deadline)
        batch = self._launch(transfers, user)
        for other in others:
            other.wait(batch.event)
        tracker, handle = self._context.tracker, transfers[0].stream
        if any(t.stream is None or t.view.staged for t in transfers):
            tracker.wait_for(tracker.add(batch))
        elif handle is not None and batch.on_end is None and not batch.event.captured:
            tracker.add_blocking(batch.operations, handle, batch.deadline, batch.ends)
        else:
            tracker.add(batch)
        if waiting and not batch.event.captured:
            self._admission.see_through(ends, deadline)

    def start(self, transfers: Sequence[MessageRequest]) -> None:
        """See `Messages.start`; by compiled code, if they need not wait for their turn."""
        handle, launch = transfers[0].stream, self._find(_key(transfers))
        if handle is not None and launch is not None and all(t.stream == handle for t in transfers):
            branch = self._branches.get(launch.rings)
            if branch is not None:
                self._check(transfers, handle)
                call_site = transfers[0].call_site or find_call_site(_INSIDE_START)
                go = partial(self._branch_off, transfers, launch, branch, handle, call_site)
                if self._admission.at_once(launch.rings, go):
                    return
        self._start_in_turn(transfers)

    def _branch_off(
        self, transfers: Sequence[MessageRequest], launch: Launch, branch: Branch, handle: int, call_site: int
    ) -> bool:
        """Let compiled code launch messages on a branch; False if it has not begun anything."""
        until, items = _soonest(transfers).at, _items(transfers)
        if not launch.run(handle, until, call_site, items=items, branch=branch):
            return False
        for t, end in zip(transfers, branch.ends, strict=True):
            if t.work is not None:
                t.work.come = partial(self._admission.come, launch.rings)
            _begun(t, Launched(branch, t, [end]))
        return True

    def _check(self, transfers: Sequence[MessageRequest], handle: int) -> None:
        """Let the device check the arrays' memory where the framework does not guarantee it."""
        unknown = array.untrusted(*[t.view for t in transfers])
        if unknown:
            self._context.device.adopt(handle, *unknown)

    def _start_in_turn(self, transfers: Sequence[MessageRequest]) -> None:
        """Pass messages through the admission queue; those that are captured in a graph start at once."""
        users = self._streams(transfers)
        self._begin_all(transfers)
        ends = _ends(transfers)
        launch = Start(transfers, [cast(Event, user.record_event()) for user in users], ends, _soonest(transfers))
        if any(event.captured for event in launch.behind):
            self._admission.let_go(ends)
            self._go(launch)
            return
        for t in transfers:
            if t.work is not None:
                t.work.come = partial(self._admission.come, ends)
        self._admission.add(launch)
        if all(t.work is None for t in transfers):  # else they have not started, and not all rings may be pinned
            self._know(transfers, ends)

    def _know(self, transfers: Sequence[MessageRequest], ends: frozenset[RingEnd]) -> None:
        """Let compiled code launch further messages of these shapes."""
        device, stream, key = self._context.device, self._of_rings.get(ends), _key(transfers)
        if stream is not None and ends not in self._branches and isinstance(device, SupportsEnqueuedEvents):
            self._branches[ends] = Branch(self._context, device, stream)
        self._prepare(transfers, key)

    def copy(self, pairs: Sequence[tuple[MessageRequest, MessageRequest]], *, waits: bool) -> None:
        """See `Messages.copy`; on the arrays' stream also those that have Works."""
        context = self._context
        for pair in pairs:
            sent, received = pair
            user, *others = self._streams(pair)
            deadline = _soonest(pair)
            try:
                operations = [self._note(t) for t in pair]
                context.tracker.seal_if_deadline_differs(sent.stream or 0, deadline)
                with context.enqueueing:
                    for other in others:
                        user.wait(other.record_event())
                    context.device.copy(received.view.address, sent.view.address, sent.view.nbytes, user)
                    event = cast(Event, user.record_event())
                    for other in others:
                        other.wait(event)
            except BaseException as error:
                user.discard()
                self._fail(pair, error)
            batch = Batch(
                operations, deadline, [], stream=user, event=event, blocking=waits, keep=[t.view for t in pair]
            )
            context.tracker.add(batch)
            if waits and any(t.stream is None or t.view.staged for t in pair):
                context.tracker.wait_for(batch)
            for t in pair:
                _begun(t, Tracked(self._context.tracker, batch))

    def settle(self, peers: Collection[int], channel: int) -> None:
        if self._admission:
            self._admission.let_go_to(peers, channel)

    def _streams(self, transfers: Sequence[MessageRequest]) -> list[Stream]:
        """The arrays' streams, each once."""
        adopt = self._context.device.adopt
        return list(dict.fromkeys(adopt(t.stream, *array.untrusted(t.view)) for t in transfers))

    def _begin_all(self, transfers: Sequence[MessageRequest]) -> None:
        try:
            for t in transfers:
                self._begin(t)
        except BaseException as error:
            self._fail(transfers, error)

    def _go(self, launch: Start[MessageRequest]) -> None:
        """Launch asynchronous messages."""
        stream = self._stream_of(launch.ends)
        taken = stream is None
        self._launch(launch.transfers, stream or self._take_stream(), launch.behind, background=True, taken=taken)

    def _stream_of(self, ends: frozenset[RingEnd]) -> Stream | None:
        """The stream of these rings, on which launches follow one another without events; None if they have none."""
        found = self._of_rings.get(ends)
        if found is None and len(self._of_rings) < _RING_STREAMS:
            found = self._of_rings[ends] = self._context.device.streams(1)[0]
        return found

    def _launch(
        self, transfers: Sequence[MessageRequest], stream: Stream, behind: Sequence[Event] = (), *, background: bool = False,
        taken: bool = False,
    ) -> Batch:  # fmt: skip
        """Launch messages on a stream, and those of further channels each on a stream of its own.

        Messages of one ring follow one another in several launches. On one stream they would also wait for messages of other
        channels.

        Args:
            behind: events that they wait for.
            background: whether they have Works; the tracker tracks them from now on.
            taken: whether the stream comes from `_take_stream`.
        """
        ends: Ends = []
        further = {t.channel for t in transfers if t.channel != transfers[0].channel}
        beside = {channel: self._take_stream() for channel in further}
        try:
            with self._context.enqueueing:  # threads may have messages for one ring
                for before in behind:
                    self._context.tracker.join(stream, before)
                if beside:
                    start = stream.record_event()
                for other in beside.values():
                    other.wait(start)
                    other.together()
                if len(transfers) > 1:
                    stream.together()
                for t in transfers:
                    end = self._enqueue(t, beside.get(t.channel, stream))
                    assert t.operation is not None
                    ends.append((end, end.sequence, t.operation))
                for through in [other.record_event() for other in beside.values()]:
                    stream.wait(through)
                event = cast(Event, stream.record_event())
                batch = Batch(
                    [operation for _, _, operation in ends], _soonest(transfers), ends, stream=stream, event=event,
                    blocking=not background, keep=[t.view for t in transfers] if background else None,
                )  # fmt: skip
                back = [stream, *beside.values()] if taken else list(beside.values())
                batch.on_end = partial(self._free.extend, back) if back else None
                if background:
                    self._context.tracker.add(batch)
        except BaseException as error:
            for used in (stream, *beside.values()):
                used.discard()
            self._fail(transfers, error)
        for t in transfers:
            _begun(t, Tracked(self._context.tracker, batch))
        return batch


def _key(transfers: Sequence[MessageRequest]) -> Hashable:
    """The shape of messages that start together."""
    return tuple([t.shape() for t in transfers])


def _items(transfers: Sequence[MessageRequest]) -> list[int]:
    """See `Launch.run`."""
    return [word for t in transfers for word in (t.view.address, 0, t.tag, t.call_site)]


def _begun(t: MessageRequest, completion: Completion) -> None:
    """Tell the Work of a message, if it has one, how it ends."""
    if t.work is not None:
        t.work.completion, t.work = completion, None


def _ends(transfers: Sequence[MessageRequest]) -> frozenset[RingEnd]:
    return frozenset(t.end for t in transfers if t.end is not None)


def _soonest(transfers: Sequence[MessageRequest]) -> Deadline:
    return transfers[0].deadline if len(transfers) == 1 else min((t.deadline for t in transfers), key=attrgetter("at"))
