"""Options of `xvcomm certify`, as the command passes them to the ranks."""

from __future__ import annotations

import msgspec

NAMES = (
    "versions", "operations", "messages", "streams", "graphs", "faults", "rails", "failover", "rdma", "direct",
    "training", "speed",
)  # fmt: skip
"""Of all sections, in the order in which they run; here because the sections load numba, which the command's help need not."""


class Options(msgspec.Struct, frozen=True):
    """What to certify, and where to write the report.

    Attributes:
        sections: names of `NAMES`; empty for all.
        quick: whether few sizes are enough.
        seconds: that all may take; None for as long as this job's devices should.
        out: folder of the report, or an empty text.
        labels: an island label per rank, if the command starts the ranks itself.
        verdict: file for the exit code, if it does: ranks that exit with it would count as failed.
    """

    sections: tuple[str, ...] = ()
    quick: bool = False
    seconds: float | None = None
    out: str = ""
    labels: tuple[str, ...] = ()
    verdict: str = ""

    def told(self) -> str:
        """As words of the command."""
        parts = ["xvcomm certify"]
        parts += ["--quick"] if self.quick else []
        parts += [f"--sections {','.join(self.sections)}"] if self.sections else []
        parts += [f"--seconds {self.seconds:g}"] if self.seconds else []
        return " ".join(parts)
