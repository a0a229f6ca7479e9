"""Matches messages to receives by source and tag, in any order, as in MPI.

xvcomm matches messages of one pair and channel in the order in which they were sent. So every tag is mapped to a channel, and
receives probe before they receive. If two tags share a channel, a message in front of the wanted one is received into separate
memory until a receive matches it. The tag given to xvcomm also contains the message's sequence number, so that receives with
ANY_TAG preserve the order of sending.

No thread runs in the background: posted receives are matched by `progress`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from xvcomm.adapters.mpi import control, progress
from xvcomm.adapters.mpi.messages import (
    ANY_SOURCE,
    ANY_TAG,
    NUMBERS,
    TAG_UB,
    Array,
    Arrived,
    Envelope,
    Receive,
    Room,
    channel_of,
    scratch,
)
from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.errors import ArgumentError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import from_numpy

_AT_ONCE = 32 << 10
"""Messages up to this size in bytes are moved by the caller's thread, which is faster than handing them to another."""


class Send:
    """A send that was started.

    Args:
        work: of the transfer; None if it is complete.
        key: if the receiver must acknowledge the message; else None.
    """

    def __init__(self, matcher: Matcher, work: Work | None, key: control.Key | None) -> None:
        self._matcher, self._work, self._key = matcher, work, key
        self.timeout = matcher.timeout

    def over(self) -> bool:
        """Whether it has completed or failed. Never blocks."""
        return (self._work is None or self._work.done()) and (self._key is None or self._matcher.answered(self._key))

    def check(self) -> None:
        """Raise its error, once it is over."""
        if self._work is not None:
            self._work.wait()

    def late(self) -> None:
        """Raise DeadlineExceeded for a synchronous message; transfers have deadlines of their own."""
        if self._key is not None and not self._matcher.answered(self._key):
            raise DeadlineExceeded(
                f"rank {self._key[0]} has not received a synchronous message after {self.timeout:g} s"
            )


class Matcher:
    """The messages of one communicator. Thread-safe."""

    def __init__(self, communicator: Communicator) -> None:
        self._comm = communicator
        everybody = range(communicator.size)
        self._control = control.Control(communicator)
        self.after_fork()
        self._posted: list[Receive] = []
        self._arrived: list[deque[Arrived]] = [deque() for _ in everybody]
        self._next = [0] * communicator.size
        self._ahead: list[set[int]] = [set() for _ in everybody]
        self._claimed: set[tuple[int, int]] = set()
        self._sent = [0] * communicator.size

    def after_fork(self) -> None:
        """Replace the locks: threads that a forked child does not have may hold the copied ones."""
        self._gate, self._sending = threading.RLock(), threading.Lock()

    @property
    def timeout(self) -> float:
        """Timeout of an operation in seconds."""
        return self._comm.timeout

    @property
    def intact(self) -> bool:
        """Whether the communicator has not failed; ranks may have left it regularly."""
        with contextlib.suppress(XvcommError):
            self._comm.check()
            return True
        return False

    def send(self, data: Array, dest: int, tag: int, *, synchronous: bool = False) -> Send | None:
        """Send a vector. Returns None if that is complete, else the Send to wait for before `data` may be modified.

        Args:
            synchronous: whether the send completes only when it is matched by a receive.

        Raises:
            ArgumentError: the rank or tag is invalid.
        """
        self._check(dest, tag)
        with self._sending:
            number = self._sent[dest]
            self._sent[dest] = (number + 1) % NUMBERS
            envelope = Envelope(dest, tag, number, data.nbytes, from_numpy(data.dtype), synchronous)
            work = None
            if synchronous:
                self._expect(dest, number)
            if dest == self._comm.rank:
                self._keep(envelope, data)
            else:
                work = self._put(envelope, data)
        if synchronous:
            return Send(self, work, (dest, number))
        return None if work is None else Send(self, work, None)

    def _put(self, envelope: Envelope, data: Array) -> Work | None:
        dest, channel = envelope.source, envelope.channel
        if channel:
            with self._gate:
                self._control.announce(dest, channel)
        if envelope.nbytes > _AT_ONCE or progress.busy():
            return self._comm.isend(data, dest, envelope.wire, channel=channel)
        self._comm.send(data, dest, envelope.wire, channel=channel)
        return None

    def _expect(self, dest: int, number: int) -> None:
        with self._gate:
            self._control.expect((dest, number))
            progress.add(self)

    def answered(self, key: control.Key) -> bool:
        """Whether a synchronous message has been acknowledged.

        Raises:
            PeerLost: its receiver has left without an acknowledgement.
        """
        with self._gate:
            return self._control.answered(key)

    def look_after(self, send: Send) -> None:
        """Keep a detached send alive until it is complete."""
        if send._work is not None:
            self._control.look_after(send._work)

    def flush(self) -> None:
        """Wait for detached sends."""
        self._control.flush()

    def _keep(self, envelope: Envelope, data: Array) -> None:
        """Store a copy of a message of this rank to itself until it is received."""
        with self._gate:
            self._arrived[envelope.source].append(Arrived(envelope, data.copy(), None))

    def post(self, source: int, tag: int, room: Room, *, waits: bool = False) -> Receive:
        """Post a receive.

        Args:
            source: rank, or ANY_SOURCE.
            tag: tag, or ANY_TAG.
            waits: whether the caller will wait for it at once, so that its thread may move the message.

        Raises:
            ArgumentError: the rank or tag is invalid.
        """
        self._check(source, tag, -1)
        receive = Receive(source, tag, room)
        with self._gate:
            self._posted.append(receive)
            progress.add(self)
            self.advance(receive if waits else None)
        return receive

    def finish(self, receive: Receive) -> None:
        """Block until a receive is over, and raise its error, if any."""
        deadline = Deadline.after(self.timeout)
        place = receive.source, channel_of(receive.tag)
        if receive.tag != ANY_TAG and receive.source not in (ANY_SOURCE, self._comm.rank):
            while not receive.over() and self._claim(receive, place):
                try:
                    self._comm.probe(receive.source, channel=place[1])
                finally:
                    self._claimed.discard(place)
                self.advance(receive)
        progress.wait_until(receive.over, deadline, self.late)
        receive.check()

    def _claim(self, receive: Receive, place: tuple[int, int]) -> bool:
        """Whether this thread has nothing else to progress, so that it may wait in compiled code for a message from `place`.

        No other thread probes `place` then: it could take the message that this one waits for.
        """
        with self._gate:
            alone = progress.only(self) and self._posted == [receive] and not self._control.expecting
            if alone:
                self._claimed.add(place)
            return alone

    def cancel(self, receive: Receive) -> bool:
        """Cancel a receive that has not been matched; returns whether that was possible."""
        with self._gate:
            if receive not in self._posted:
                return False
            receive.cancel()
            self._posted.remove(receive)
            self._rest()
            return True

    def advance(self, urgent: Receive | None = None) -> None:
        """Match available messages to posted receives, in the order of posting. Never blocks."""
        with self._gate:
            self._control.listen()
            for receive in self._posted.copy():
                if receive in self._posted:
                    self._serve(receive, urgent)
            self._rest()

    def look(self, source: int, tag: int) -> Envelope | None:
        """The message that a receive posted now would get; None if there is none yet."""
        with self._gate:
            found = self._unclaimed(source, tag)
            return found.envelope if isinstance(found, Arrived) else found

    def take(self, source: int, tag: int) -> Arrived | None:
        """Like `look`, but takes the message, so that no other receive gets it."""
        with self._gate:
            found = self._unclaimed(source, tag)
            if isinstance(found, Envelope):
                found = self._pull(found)
            if found is not None:
                self._arrived[found.envelope.source].remove(found)
                self._matched(found.envelope)
            return found

    def _unclaimed(self, source: int, tag: int) -> Arrived | Envelope | None:
        """The first message that fits and is not matched by any posted receive."""
        self._check(source, tag, -1)
        while True:
            self.advance()
            found = self._find(source, tag)
            if found is None or self._taker(found) is None:
                return found

    def late(self) -> None:
        """Raise DeadlineExceeded on behalf of the first waiting receive."""
        with self._gate:
            receive = next(iter(self._posted), None)
        if receive is not None:
            self.expire(receive.source, receive.tag)

    def expire(self, source: int, tag: int) -> None:
        """Raise DeadlineExceeded for a message that did not arrive; names the ranks that sent nothing."""
        if source == self._comm.rank or self._comm.size == 1:
            raise DeadlineExceeded(
                f"rank {self._comm.rank} waits for a message from itself but has sent none; Isend it first"
            )
        self._comm.probe(_given(source), channel=0 if tag == ANY_TAG else channel_of(tag), timeout=0)

    def close(self) -> None:
        """Wait for detached sends, and cancel the receives that have not been matched."""
        self.flush()
        with self._gate:
            for receive in self._posted.copy():
                self.cancel(receive)
            progress.discard(self)

    def _rest(self) -> None:
        if not self._posted and not self._control.expecting:
            progress.discard(self)

    def _serve(self, receive: Receive, urgent: Receive | None) -> None:
        """Match messages to a receive, or to earlier ones that fit, until it has one or none is available."""
        while receive in self._posted:
            try:
                found = self._find(receive.source, receive.tag)
            except XvcommError as error:
                if receive.source != ANY_SOURCE or not isinstance(error, PeerLost) or not self._others_send():
                    self._posted.remove(receive)
                    receive.fail(error)
                return
            if found is None:
                return
            # A message that arrived while the others were served may belong to one of them.
            taker = self._taker(found) or receive
            self._posted.remove(taker)
            self._give(found, taker, taker is urgent)

    def _taker(self, found: Arrived | Envelope) -> Receive | None:
        """The earliest posted receive that a message fits."""
        envelope = found.envelope if isinstance(found, Arrived) else found
        first = envelope.number == self._next[envelope.source]
        return next((r for r in self._posted if r.fits(envelope, first)), None)

    def _give(self, found: Arrived | Envelope, receive: Receive, at_once: bool) -> None:
        if isinstance(found, Arrived):
            self._arrived[found.envelope.source].remove(found)
            self._matched(found.envelope)
            receive.copy(found)
            return
        self._matched(found)
        where, channel = receive.accept(found), found.channel
        if at_once or found.nbytes <= _AT_ONCE:
            try:
                self._comm.recv(where, found.source, found.wire, channel=channel)
            except XvcommError as error:
                receive.fail(error)
            else:
                receive.follow(None)
        else:
            receive.follow(self._comm.irecv(where, found.source, found.wire, channel=channel))

    def _others_send(self) -> bool:
        """Whether another thread of this rank may still send to it, all other ranks having left."""
        mine = threading.current_thread()
        return self.intact and any(thread is not mine and not thread.daemon for thread in threading.enumerate())

    def _find(self, source: int, tag: int) -> Arrived | Envelope | None:
        """The first message in order that fits; messages in front of it are moved to separate memory."""
        sources = range(self._comm.size) if source == ANY_SOURCE else (source,)
        for rank in sources:
            for arrived in self._arrived[rank]:
                envelope = arrived.envelope
                if tag == envelope.tag or (tag == ANY_TAG and envelope.number == self._next[rank]):
                    return arrived
        if self._comm.size == 1 or source == self._comm.rank:
            return None
        if tag == ANY_TAG:
            return self._find_next(source)
        while (head := self._head(source, channel_of(tag))) is not None and head.tag != tag:
            self._pull(head)
        return head

    def _find_next(self, source: int) -> Envelope | None:
        """The message of any tag that was sent first, if it is available."""
        gone: PeerLost | None = None
        try:
            self._control.hear(_given(source))
        except PeerLost as error:
            gone = error  # the channels may still contain messages that were sent before
        peers = range(self._comm.size) if source == ANY_SOURCE else (source,)
        for channel in set[int]().union(*(self._control.heard[rank] for rank in peers)):
            try:
                envelope = self._head(source, channel)
            except PeerLost:
                continue
            if envelope is not None and envelope.number == self._next[envelope.source]:
                return envelope
        if gone is not None:
            raise gone
        return None

    def _head(self, source: int, channel: int) -> Envelope | None:
        """The next message on a channel, from one rank or any."""
        if not self._claimed:
            probe = self._comm.iprobe(_given(source), channel=channel)
            return None if probe is None else Envelope.of(probe)
        peers = range(self._comm.size) if source == ANY_SOURCE else (source,)
        for peer in peers:
            if peer != self._comm.rank and (peer, channel) not in self._claimed:
                with contextlib.suppress(PeerLost) if source == ANY_SOURCE else contextlib.nullcontext():
                    probe = self._comm.iprobe(peer, channel=channel)
                    if probe is not None:
                        return Envelope.of(probe)
        return None

    def _pull(self, envelope: Envelope) -> Arrived:
        """Receive a message into separate memory."""
        data = scratch(envelope)
        work = self._comm.irecv(data, envelope.source, envelope.wire, channel=envelope.channel)
        arrived = Arrived(envelope, data, work)
        self._arrived[envelope.source].append(arrived)
        return arrived

    def _matched(self, envelope: Envelope) -> None:
        """A message has been matched: acknowledge it if it is synchronous, and find the next unmatched one of its source."""
        if envelope.synchronous:
            self._control.acknowledge(envelope.source, envelope.number)
        source, ahead = envelope.source, self._ahead[envelope.source]
        ahead.add(envelope.number)
        while self._next[source] in ahead:
            ahead.remove(self._next[source])
            self._next[source] = (self._next[source] + 1) % NUMBERS

    def _check(self, peer: int, tag: int, least: int = 0) -> None:
        if not least <= peer < self._comm.size:
            raise ArgumentError(f"rank {peer}: ranks of this communicator go from 0 to {self._comm.size - 1}")
        if not least <= tag <= TAG_UB:
            raise ArgumentError(f"tag {tag}: must be from 0 to {TAG_UB}")


def _given(source: int) -> int | None:
    return None if source == ANY_SOURCE else source
