"""Layout of ranks: stages x replicas, distributed over the islands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llama.config import Part
from xvcomm.errors import ArgumentError
from xvcomm.pipeline.balance import split_layers
from xvcomm.types.topology import Topology


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid of pipeline stages by data-parallel replicas.

    Attributes:
        stages: ranks of each stage, one per replica. Stages are filled island by island, so that with as many stages
            as islands of equal size, each stage's replicas lie in one island.
    """

    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, topology: Topology, pp: int | None, dp: int | None) -> Layout:
        """The grid for a topology. Defaults: `pp` follows from `dp`; without either, one stage per island.

        Raises:
            ArgumentError: stages times replicas is not the number of ranks.
        """
        size = topology.size
        pp = pp or (size // dp if dp else len(topology.islands))
        dp = dp or max(1, size // pp)
        if pp * dp != size:
            raise ArgumentError(
                f"{pp} stages x {dp} replicas need {pp * dp} ranks, the job has {size}: change --pp, --dp or the ranks"
            )
        order = [rank for island in topology.islands for rank in island.ranks]
        return cls(tuple(tuple(order[stage * dp : (stage + 1) * dp]) for stage in range(pp)))

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return len(self.stages[0])

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica index of a rank."""
        return next((s, ranks.index(rank)) for s, ranks in enumerate(self.stages) if rank in ranks)


def cut(layers: int, depth: int, given: Sequence[int] | None = None) -> list[Part]:
    """Cut the model into `depth` virtual stages, evenly or as `given`.

    Raises:
        ArgumentError: there are fewer layers than virtual stages, or `given` does not fit.
    """
    if layers < depth:
        raise ArgumentError(f"{layers} layers cannot fill {depth} pipeline stages: more --layers, or a smaller --pp")
    if given is not None and (len(given) != depth or sum(given) != layers or min(given) < 1):
        raise ArgumentError(
            f"--layers-per-stage {','.join(map(str, given))}: expected {depth} positive numbers with sum {layers}"
        )
    counts = given or split_layers(layers, [1.0] * depth)
    starts = [sum(counts[:stage]) for stage in range(depth)]
    return [
        Part(start, start + count, embeds=stage == 0, predicts=stage == depth - 1)
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def numbers(text: str | None) -> list[int] | None:
    """Parse `"15,17"`; None stays None.

    Raises:
        ArgumentError: the text is not a comma-separated list of whole numbers.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{text!r}: expected whole numbers with commas between, for instance 15,17") from None
