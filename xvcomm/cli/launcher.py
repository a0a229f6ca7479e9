"""Starts a job's ranks on this host, forwards their output and signals, and ends all of them when one fails."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from xvcomm.cli.ending import Others, Outcome, Stop
from xvcomm.cli.last_dumps import LastDumps
from xvcomm.cli.output import Outlet, RankStream, outlets, prefixes
from xvcomm.cli.rank_process import RankProcess, RankSpec, signal_name
from xvcomm.errors import ResourceError

_READ = 1 << 16
_BACKLOG = 1 << 20
_DRAIN = 1.0
_LAST_WRITE = 0.2
FAILURE_GRACE = 3.0
STOP_GRACE = 1.5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_CONSEQUENCES = (b"xvcomm.errors.PeerLost", b"xvcomm.errors.Aborted")


class Job:
    """The ranks of one job, as a context manager: leaving it kills the ranks that still run.

    One thread with one loop handles pipes, exits of ranks and signals, through one selector.

    Args:
        specs: one per rank, in rank order.
        prefix: whether output lines are prefixed with their rank.
        grace: seconds between the request to end and SIGKILL.
        first: rank of the first of them.
        others: the launchers of other hosts, with which this one ends.
        survive: whether the other ranks go on when one fails.
        restarts: how often each rank that fails is started again meanwhile, to join the others.
        returned: how many of the processes that were started again as this rank have joined the others.
    """

    def __init__(
        self, specs: Sequence[RankSpec], *, prefix: bool = True, grace: float = STOP_GRACE, first: int = 0,
        others: Others | None = None, survive: bool = False, restarts: int = 0,
        returned: Callable[[int], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self._specs, self._first, self._others = specs, first, others
        self._prefix, self._survive = prefix, survive
        self._left, self._returned, self._abandoned = [restarts] * len(specs), returned, False
        self._grace = grace
        self._ranks: list[RankProcess] = []
        self._selector = selectors.PollSelector()
        self._open: dict[int, RankStream] = {}
        self._paused = False
        self._outlets: tuple[Outlet, Outlet] = outlets(os.environ)
        self._failing = False
        self._failed: list[tuple[int, RankProcess]] = []
        self._last_read = math.inf
        self._signal: signal.Signals | None = None
        self._plan: list[tuple[float, signal.Signals]] = []
        self._handlers: dict[signal.Signals, object] = {}
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._dumps = LastDumps(specs[0].env if specs else {}, self.say)

    def __enter__(self) -> Job:
        for number in (signal.SIGCHLD, signal.SIGTSTP, *_ENDING, *_PASSED_ON):
            # A signal that the launcher inherited as ignored, for instance from nohup, stays ignored.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1])
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        if self._others is not None:
            self._selector.register(self._others.news, selectors.EVENT_READ, self._others)
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.end()
        for fd in list(self._open):
            self._close(fd)
        self._selector.close()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for fd in self._wake:
            os.close(fd)

    def _start(self) -> None:
        labels = [spec.label for spec in self._specs]
        blank = [b""] * len(labels)
        self._prefixes = [prefixes(labels, o.colour, self._first) if self._prefix else blank for o in self._outlets]
        for number, spec in enumerate(self._specs):
            self._ranks.append(self._rank(number, spec))

    def _rank(self, number: int, spec: RankSpec) -> RankProcess:
        """Start a rank, and forward what it writes."""
        out, err = (
            RankStream(outlet, each[number]) for outlet, each in zip(self._outlets, self._prefixes, strict=True)
        )
        rank = RankProcess(number, spec, out, err)
        for fd, stream in rank.take_pipes().items():
            self._open[fd] = stream
            if not self._paused:
                self._selector.register(fd, selectors.EVENT_READ)
        return rank

    def _restart(self, number: int) -> None:
        """Start a rank that has failed again; it joins the others when they grow."""
        self._left[number] -= 1
        before, spec = self._ranks[number], self._specs[number]
        before.end()
        awaited = self._returned(number) + 1
        try:
            self._ranks[number] = self._rank(number, replace(spec, env={**spec.env, "XVCOMM_REJOIN": "1"}))
        except ResourceError as error:
            self.say(f"{error}; the others go on without it")
        else:
            self._ranks[number].awaited = awaited

    def _belongs(self, number: int) -> bool:
        """Whether a rank is one of the job: it has not been started again, or has joined the others since."""
        awaited = self._ranks[number].awaited
        return not awaited or self._returned(number) >= awaited

    def _goes_on(self) -> bool:
        """Whether a rank of the job runs, which others can join."""
        return any(rank.code is None and self._belongs(number) for number, rank in enumerate(self._ranks))

    def _abandon(self) -> None:
        """Begin to end the ranks that wait to join a job of which no rank is left."""
        if self._plan or not any(rank.code is None for rank in self._ranks) or self._goes_on():
            return
        self._abandoned = True
        start = time.monotonic() + FAILURE_GRACE
        self._plan = [(start, signal.SIGTERM), (start + self._grace, signal.SIGKILL)]
        self.say(f"no rank is left for those to join that were started again; they have {FAILURE_GRACE:g} s to end")

    def run(self) -> Outcome:
        """Forward output and signals until every rank has ended; blocks.

        If a rank fails, the others get 3 seconds to raise their own errors, then SIGTERM, then SIGKILL, unless they survive.
        """
        self._go_on(self._drained)
        self._reap()
        self._dumps.finish()
        if self._others is not None:
            self._others.end(self._outcome())
            self._go_on(self._others.over)
        self._flush()
        if self._others is not None and self._signal is None:
            return self._others.outcome()
        return self._outcome()

    def _go_on(self, until: Callable[[], float]) -> None:
        """Forward output and signals until a time on the monotonic clock, which may change meanwhile."""
        while (end := until()) > (now := time.monotonic()):
            self._follow_plan(now)
            for outlet in self._outlets:
                if now >= outlet.redraw_at:
                    outlet.redraw()
            due = min([when for when, _ in self._plan] + [end] + [o.redraw_at for o in self._outlets])
            self._turn(None if due == math.inf else max(0.0, due - now))

    def _drained(self) -> float:
        """Until when to read what the ranks have written: they have ended, but what they have started may hold the pipes."""
        if any(rank.code is None for rank in self._ranks):
            return math.inf
        self._last_read = min(self._last_read, time.monotonic() + _DRAIN)
        return self._last_read if self._open else -math.inf

    def _turn(self, timeout: float | None) -> None:
        self._choose()
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake[0]:
                for number in os.read(key.fd, 256):
                    self._on_signal(signal.Signals(number))
            elif isinstance(key.data, Outlet):
                self._write(key.data)
            elif self._others is not None and key.data is self._others:
                for stop in self._others.hear():
                    self._stop_with(stop)
            else:
                self._read(key.fd)

    def _choose(self) -> None:
        """Select for what can make progress: outlets with data to write; ranks only while the outlets keep up."""
        for outlet in set(self._outlets):
            waiting = outlet.backlog > 0
            if waiting != (outlet.fd in self._selector.get_map()):
                if waiting:
                    self._selector.register(outlet.fd, selectors.EVENT_WRITE, outlet)
                else:
                    self._selector.unregister(outlet.fd)
        paused = any(o.backlog > _BACKLOG for o in self._outlets)
        if paused != self._paused:
            self._paused = paused
            for fd in self._open:
                if paused:
                    self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ)

    def _read(self, fd: int) -> None:
        stream = self._open[fd]
        data = os.read(fd, _READ)
        stream.feed(data)
        if not data:
            self._close(fd)

    def _close(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        del self._open[fd]
        os.close(fd)

    def _write(self, outlet: Outlet) -> None:
        try:
            outlet.write_some()
        except BlockingIOError:
            pass
        except OSError:
            outlet.discard()
            if self._signal is None:
                self._end_job(Stop("", signal.SIGPIPE))

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._collect()
        elif number == signal.SIGTSTP:
            self._signal_all(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif number in _PASSED_ON:
            self._signal_all(number)
        elif self._signal is None:
            self._end_job(Stop("", number))
        else:
            self._signal_all(signal.SIGKILL)

    def _collect(self) -> None:
        """Record which ranks have ended. They are reaped at the very end, so that the ids of their process groups are not
        reused.
        """
        ended = [number for number, rank in enumerate(self._ranks) if rank.note_end()]
        # Among ranks found at the same time, one killed by a signal is more likely the cause than one that exited.
        for number in sorted(ended, key=lambda number: (self._ranks[number].code or 0) >= 0):
            if self._ranks[number].code and self._signal is None:
                self._note_failure(number)
        if ended and self._survive and self._signal is None:
            self._abandon()

    def _note_failure(self, number: int) -> None:
        rank = self._ranks[number]
        if self._survive:
            if self._belongs(number):  # the others have replaced those before
                self._failed = [(other, failed) for other, failed in self._failed if other != number]
            elif self._abandoned:
                return
            self._failed.append((number, rank))
            if self._goes_on():
                again = self._left[number] > 0
                how = self._describe(number, rank)
                self.say(f"{how}; the others go on" + (", and it is started again" if again else ""))
                if again:
                    self._restart(number)
            return
        if not self._failing:
            self._end_job(Stop(self._describe(number, rank)))
        if len(self._plan) == 2:
            self._failed.append((number, rank))

    def _end_job(self, stop: Stop) -> None:
        """Begin to end the ranks of all hosts."""
        if self._others is not None:
            self._others.stop(stop)
        self._stop_with(stop)

    def _stop_with(self, stop: Stop) -> None:
        """Begin to end the ranks of this host, unless that has begun for a signal, or for a failure as well."""
        if self._signal is not None:
            return
        if stop.signal is not None:
            self._signal, self._abandoned = stop.signal, False
            self._end_all(stop.signal if stop.signal in _ENDING else signal.SIGTERM)
            self._plan = [(time.monotonic() + self._grace, signal.SIGKILL)]
        elif not self._failing:
            self._failing = True
            start = time.monotonic() + FAILURE_GRACE
            self._plan = [(start, signal.SIGTERM), (start + self._grace, signal.SIGKILL)]
            if any(rank.code is None for rank in self._ranks):
                self.say(f"{stop.reason}; the others have {FAILURE_GRACE:g} s to end")

    def _describe(self, number: int, rank: RankProcess) -> str:
        """How a rank ended, as text."""
        code = rank.code or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        label, where = self._specs[number].label, f" on {self._others.hostname}" if self._others is not None else ""
        return f"rank {self._first + number}{f' ({label})' if label else ''}{where} {how}"

    def say(self, text: str) -> None:
        """Print a line of the launcher among the ranks' lines on stderr."""
        self._outlets[1].add(None, f"xvcomm run: {text}\n".encode(), b"")

    def _follow_plan(self, now: float) -> None:
        while self._plan and now >= self._plan[0][0]:
            if self._abandoned and self._goes_on():  # one has joined just before the others ended
                self._plan, self._abandoned = [], False
                return
            self._end_all(self._plan.pop(0)[1])

    def _end_all(self, number: signal.Signals) -> None:
        """Send a signal that ends ranks, but for those that handle it; before the first one write down what they do."""
        if number != signal.SIGKILL:
            self._dumps.take(rank.group for rank in self._ranks if rank.code is None)
        self._signal_all(number)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.signal(number)

    def _reap(self) -> None:
        """Kill what the ranks left running, and read the last output."""
        for rank in self._ranks:
            rank.end()
        for fd, stream in list(self._open.items()):
            os.set_blocking(fd, False)
            try:
                while data := os.read(fd, _READ):
                    stream.feed(data)
            except BlockingIOError:
                pass
            stream.feed(b"")
            self._close(fd)

    def _flush(self) -> None:
        """Wait until the output is written."""
        for outlet in set(self._outlets):
            outlet.restore()
        # A reader that has stopped must not delay an interrupt.
        until = math.inf if self._signal is None else time.monotonic() + _LAST_WRITE
        while any(o.backlog for o in self._outlets) and (left := until - time.monotonic()) > 0:
            self._turn(None if left == math.inf else left)
            if self._signal is not None and until == math.inf:
                until = time.monotonic() + _LAST_WRITE

    def _outcome(self) -> Outcome:
        if self._signal is not None:
            return Outcome(128 + self._signal, signal=self._signal)
        if not self._failed or (self._survive and any(rank.code == 0 for rank in self._ranks)):
            return Outcome(0)
        words = [rank.err.last or rank.out.last for _, rank in self._failed]
        # The rank that caused the failure may take longer to end than the ranks that noticed it.
        causes = [n for n, last in enumerate(words) if not any(c in w for c in _CONSEQUENCES for w in last)]
        first = causes[0] if causes else 0
        number, rank = self._failed[first]
        code = rank.code or 0
        return Outcome(
            code if code >= 0 else 128 - code,
            self._describe(number, rank),
            last_words=tuple(words[first]),
            consequence=not causes,
        )
