"""What to train and how often: the settings of a job, and the phases in which its variants take turns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from joint.links import COMMS
from joint.shapes import SHAPES
from xvcomm.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Attributes:
        name: in the records.
        comm: the libraries, a key of `links.COMMS`.
        layers: of each stage: "even", "balanced" by measured speeds, or numbers such as "15,17".
        slow: an island and how many times its layers' arithmetic it does, "amd:1.2"; empty: none.
    """

    name: str
    comm: str
    layers: str = "even"
    slow: str = ""

    def __post_init__(self) -> None:
        if self.comm not in COMMS:
            raise ArgumentError(f"--comm {self.comm}: use one of {', '.join(COMMS)}")


@dataclass(frozen=True, slots=True)
class Phase:
    """Variants that are compared.

    Attributes:
        name: in the records.
        variants: in their order within a turn.
        turns: of each variant.
        iterations: of a turn, measured.
        warmup: iterations before, in a variant's first turn.
        seconds: of a variant, after which it takes no more turns.
        context: tokens of a sequence.
        sequences: of a micro-batch.
        micro_batches: of a replica in a step.
        fresh: whether each variant begins with the initial parameters and the first text.
    """

    name: str
    variants: tuple[Variant, ...]
    turns: int = 1
    iterations: int = 4
    warmup: int = 1
    seconds: float = 120.0
    context: int = 4096
    sequences: int = 1
    micro_batches: int = 16
    fresh: bool = False

    def without(self, names: Iterable[str]) -> Phase:
        """The same without some of its variants."""
        return replace(self, variants=tuple(v for v in self.variants if v.name not in names))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a job.

    Attributes:
        model: a key of `shapes.SHAPES`.
        phases: in their order.
        islands: name of each stage's island, a label: a rehearsal; empty: xvcomm finds the islands, one for each stage.
        dtype: of parameters, gradients and activations.
        state: dtype of the optimizer's moments.
        checkpointing: whether layers are computed again for backward.
        deterministic: whether torch uses deterministic algorithms, so that the same arithmetic gives the same bits.
        lr: learning rate after `warmup` steps.
        seed: of parameters and text.
        budget: seconds after which all phases end, on the first rank's clock; 0: none.
    """

    model: str
    phases: tuple[Phase, ...]
    islands: tuple[str, ...] = ("nvidia", "amd")
    dtype: str = "bfloat16"
    state: str = "bfloat16"
    checkpointing: bool = True
    deterministic: bool = False
    lr: float = 3e-5
    warmup: int = 100
    seed: int = 1
    budget: float = 0.0

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise ArgumentError(f"--model {self.model}: use one of {', '.join(SHAPES)}")
        for name in (self.dtype, self.state):
            if name not in ("bfloat16", "float32"):
                raise ArgumentError(f"{name}: use bfloat16 or float32")

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Settings:
        """The inverse of `text`."""
        given: dict[str, Any] = json.loads(text)
        phases = [
            Phase(**{**phase, "variants": tuple(Variant(**v) for v in phase["variants"])}) for phase in given["phases"]
        ]
        return cls(**{**given, "phases": tuple(phases), "islands": tuple(given["islands"])})
