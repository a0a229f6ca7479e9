"""Runs one step of one rank's program, for stages of any framework."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from xvcomm.errors import ScheduleError, XvcommError
from xvcomm.pipeline.actions import Backward, BackwardWeight, Compute, Forward, Group, Message, Schedule, Value
from xvcomm.pipeline.stage import Spec, StageSpec


class Pending(Protocol):
    """Result of `isend` and `irecv`; keeps its array alive until the message is complete."""

    def wait(self) -> Any:
        """Order later work after the message, and return its array."""

    def done(self) -> bool:
        """Whether the message is complete."""


class Peers(Protocol):
    """The part of a communicator that the pipeline uses."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def isend(self, x: Any, dst: int, tag: int = 0) -> Pending:
        """Start a send."""

    def irecv(self, buf: Any, src: int, tag: int = 0) -> Pending:
        """Start a receive."""

    def group(self) -> AbstractContextManager[Any]:
        """Start all messages of the block together at its end."""

    def send_object(self, obj: Any, dst: int) -> None:
        """Send a picklable object."""

    def recv_object(self, src: int) -> Any:
        """Receive an object."""

    def abort(self, reason: str) -> None:
        """Make every rank raise."""


class Step:
    """State of one rank during one step, and how each item of its program changes it."""

    def __init__(
        self,
        comm: Peers,
        schedule: Schedule,
        ranks: Sequence[int],
        stages: Sequence[Any],
        specs: Sequence[StageSpec],
        open_sends: int,
    ) -> None:
        """Begin a step.

        Args:
            comm: contains the ranks of the pipeline.
            schedule: checked with the same `specs`.
            ranks: the ranks in `comm`, by position in the pipeline.
            stages: of this rank, one per chunk.
            specs: of all virtual stages.
            open_sends: maximum number of sends in flight.
        """
        self._comm = comm
        self._schedule = schedule
        self._ranks = ranks
        self._position = ranks.index(comm.rank)
        self._stages = stages
        self._specs = specs
        self._open_sends = open_sends
        self._results: dict[Value, Any] = {}
        self._receives: dict[Value, Pending] = {}
        self._sends: deque[Pending] = deque()
        self._losses: dict[int, Any] = {}

    def do(self, item: Compute | Message | Group) -> None:
        """Execute the next item of the program."""
        match item:
            case Group():
                self._make_room(any(message.sends for message in item.messages))
                with self._comm.group():
                    for message in item.messages:
                        self._post(message)
            case Message():
                self._make_room(item.sends)
                self._post(item)
            case BackwardWeight():
                self._call(item, self._stages[item.chunk].backward_weight, item.micro_batch)
            case _:
                self._compute(item)

    def finish(self) -> list[Any]:
        """Wait for the remaining sends; return the losses in order of micro-batches."""
        while self._sends:
            self._sends.popleft().wait()
        return [self._losses[micro_batch] for micro_batch in sorted(self._losses)]

    def _make_room(self, sends: bool) -> None:
        while self._sends and (self._sends[0].done() or (sends and len(self._sends) >= self._open_sends)):
            self._sends.popleft().wait()

    def _post(self, message: Message) -> None:
        value = self._schedule.carried(self._position, message)
        peer, tag = self._ranks[message.peer], self._schedule.tag(value)
        if message.sends:
            self._sends.append(self._comm.isend(self._results.pop(value), peer, tag))
        else:
            shape, dtype = self._spec(value)
            buffer = self._call(message, self._stages[message.chunk].empty, shape, dtype)
            self._receives[value] = self._comm.irecv(buffer, peer, tag)

    def _compute(self, action: Compute) -> None:
        gradient = not isinstance(action, Forward)
        stage = self._stages[action.chunk]
        number = self._schedule.stage(self._position, action.chunk)
        source = Value(gradient, number + (1 if gradient else -1), action.micro_batch)
        given = self._take(source) if 0 <= source.stage < self._schedule.depth else None
        full = isinstance(action, Backward)
        function = (stage.backward if full else stage.backward_input) if gradient else stage.forward
        result = self._call(action, function, given, action.micro_batch)
        value = Value(gradient, number, action.micro_batch)
        if self._schedule.consumer(value) is not None:
            self._call(action, self._check, value, result)
            self._results[value] = result
        elif not gradient:
            self._losses[action.micro_batch] = result

    def _take(self, value: Value) -> Any:
        pending = self._receives.pop(value, None)
        return self._results.pop(value) if pending is None else pending.wait()

    def _spec(self, value: Value) -> Spec:
        stage = self._specs[value.stage]
        spec = stage.input if value.gradient else stage.output
        assert spec is not None, "check() guarantees it"
        return spec

    def _check(self, value: Value, result: Any) -> None:
        declared, given = self._spec(value), Spec.of(result)
        if given != declared:
            raise ScheduleError(f"{value} is {given}, but the stage declared {declared}; see input_spec, output_spec")

    def _call(self, action: Compute | Message, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            if not isinstance(error, XvcommError) or isinstance(error, ScheduleError):
                self._comm.abort(f"{action} of pipeline position {self._position} raised {error!r}")
            raise
