"""Actions of a pipeline schedule, and the assignment of virtual stages to ranks.

A pipeline has `stages` ranks, each with `chunks` virtual stages. Virtual stage k is chunk `k // stages` of rank `k % stages`,
so that adjacent virtual stages are on adjacent ranks. Ranks here are positions in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple


@dataclass(frozen=True, slots=True)
class Action:
    """Base class of all actions: what one rank does for one micro-batch in one of its chunks."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Compute(Action):
    """Base class of the actions that call the stage."""


@dataclass(frozen=True, slots=True)
class Forward(Compute):
    """Call `forward`."""


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """Call `backward`: gradients of input and weights together."""


@dataclass(frozen=True, slots=True)
class BackwardInput(Compute):
    """Call `backward_input`: the input gradient, which the previous stage needs."""


@dataclass(frozen=True, slots=True)
class BackwardWeight(Compute):
    """Call `backward_weight`: the weight gradients, which only the optimizer needs."""


@dataclass(frozen=True, slots=True)
class Message(Action):
    """Base class of the actions that start a send or a receive without waiting for it.

    Attributes:
        sends: whether it is a send.
        gradient: whether it carries a gradient, or an activation.
    """

    sends: ClassVar[bool]
    gradient: ClassVar[bool]
    peer: int


@dataclass(frozen=True, slots=True)
class SendActivation(Message):
    """Send the output of this chunk's Forward."""

    sends: ClassVar[bool] = True
    gradient: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class RecvActivation(Message):
    """Receive the input of this chunk's Forward."""

    sends: ClassVar[bool] = False
    gradient: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class SendGradient(Message):
    """Send the input gradient of this chunk's Backward or BackwardInput."""

    sends: ClassVar[bool] = True
    gradient: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class RecvGradient(Message):
    """Receive the output gradient for this chunk's Backward or BackwardInput."""

    sends: ClassVar[bool] = False
    gradient: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Group:
    """Messages that progress together: none waits for another one of the group."""

    messages: tuple[Message, ...]


Program = tuple[Compute | Message | Group, ...]


def flatten(program: Program) -> Iterator[tuple[int, Compute | Message]]:
    """Every action of a program with its position; the messages of a group share one position."""
    for position, item in enumerate(program):
        if isinstance(item, Group):
            for message in item.messages:
                yield position, message
        else:
            yield position, item


class Value(NamedTuple):
    """Data that a virtual stage passes to an adjacent one: its output, or the gradient of its input.

    Attributes:
        gradient: True for the gradient.
        stage: the virtual stage that computes it.
    """

    gradient: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "input gradient" if self.gradient else "output"
        return f"the {what} of stage {self.stage} for micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Layout:
    """Sizes of a pipeline, and the data flow that follows from them.

    Attributes:
        stages: number of ranks.
        micro_batches: micro-batches per step.
        chunks: virtual stages per rank.
    """

    stages: int
    micro_batches: int
    chunks: int

    @property
    def depth(self) -> int:
        """Number of virtual stages."""
        return self.stages * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is chunk `chunk` of `rank`."""
        return chunk * self.stages + rank

    def owner(self, stage: int) -> tuple[int, int]:
        """Rank and chunk of a virtual stage."""
        return stage % self.stages, stage // self.stages

    def carried(self, rank: int, message: Message) -> Value:
        """The value that a message of `rank` carries."""
        stage = self.stage(rank, message.chunk)
        if not message.sends:
            stage += 1 if message.gradient else -1
        return Value(message.gradient, stage, message.micro_batch)

    def consumer(self, value: Value) -> int | None:
        """The virtual stage that needs a value; None at either end of the pipeline."""
        stage = value.stage + (-1 if value.gradient else 1)
        return stage if 0 <= stage < self.depth else None

    def tag(self, value: Value) -> int:
        """Message tag of a value, unique within a step."""
        return 2 * (value.micro_batch * self.depth + value.stage) + value.gradient

    def requires(self, rank: int, action: Compute | Message) -> tuple[Value, ...]:
        """The values that must be available on `rank` before `action`."""
        stage, micro_batch = self.stage(rank, action.chunk), action.micro_batch
        own = Value(False, stage, micro_batch)
        match action:
            case Message():
                return (self.carried(rank, action),) if action.sends else ()
            case Forward():
                return (Value(False, stage - 1, micro_batch),) if stage else ()
            case BackwardWeight():
                return (Value(True, stage, micro_batch),)
            case _:
                return (own, Value(True, stage + 1, micro_batch)) if stage < self.depth - 1 else (own,)

    def provides(self, rank: int, action: Compute | Message) -> Value | None:
        """The value that is available on `rank` after `action`; None if it provides none."""
        match action:
            case Message():
                return None if action.sends else self.carried(rank, action)
            case BackwardWeight():
                return None
            case _:
                gradient = not isinstance(action, Forward)
                return Value(gradient, self.stage(rank, action.chunk), action.micro_batch)


@dataclass(frozen=True)
class Schedule(Layout):
    """A pipeline schedule: the actions of every rank in one step, in order."""

    name: str
    programs: tuple[Program, ...]
