"""The words a pipeline schedule is made of, and where each virtual stage lives.

A pipeline has `stages` ranks; each holds `chunks` virtual stages. Virtual stage k is chunk `k // stages` of rank
`k % stages`, so that neighbouring virtual stages lie on neighbouring ranks. Ranks here are positions in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions: what one rank does for one micro-batch in one of its chunks."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Compute(Action):
    """Base of the actions that call the stage."""


@dataclass(frozen=True, slots=True)
class Forward(Compute):
    """Call `forward`."""


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """Call `backward`: gradients of input and weights at once."""


@dataclass(frozen=True, slots=True)
class BackwardInput(Compute):
    """Call `backward_input`: the gradient that the previous stage waits for."""


@dataclass(frozen=True, slots=True)
class BackwardWeight(Compute):
    """Call `backward_weight`: what nobody waits for until the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Message(Action):
    """Base of the actions that post a send or a receive, without waiting for it.

    Attributes:
        peer: the other rank.
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
    """What a virtual stage gives to a neighbour: its output, or the gradient of its input.

    Attributes:
        gradient: which of the two.
        stage: the virtual stage that computes it.
        micro_batch: for which micro-batch.
    """

    gradient: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "input gradient" if self.gradient else "output"
        return f"the {what} of stage {self.stage} for micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Layout:
    """Sizes of a pipeline and the data flow that follows from them.

    Attributes:
        stages: ranks.
        micro_batches: micro-batches in a step.
        chunks: virtual stages a rank.
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
        """What a message of `rank` carries."""
        stage = self.stage(rank, message.chunk)
        if not message.sends:
            stage += 1 if message.gradient else -1
        return Value(message.gradient, stage, message.micro_batch)

    def consumer(self, value: Value) -> int | None:
        """The virtual stage that needs a value, None at either end of the pipeline."""
        stage = value.stage + (-1 if value.gradient else 1)
        return stage if 0 <= stage < self.depth else None

    def tag(self, value: Value) -> int:
        """The tag under which a value travels, different for every value of a step."""
        return 2 * (value.micro_batch * self.depth + value.stage) + value.gradient

    def requires(self, rank: int, action: Compute | Message) -> tuple[Value, ...]:
        """The values that must be on `rank` when it comes to `action`."""
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
        """The value that is on `rank` once `action` is done, None if it brings none."""
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
    """A pipeline schedule: what every rank does in one step, in order.

    Attributes:
        name: for messages.
        programs: one a rank.
    """

    name: str
    programs: tuple[Program, ...]
