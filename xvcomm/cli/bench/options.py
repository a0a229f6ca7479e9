"""Options of `xvcomm bench`, as passed from the command to the ranks."""

from __future__ import annotations

import msgspec

from xvcomm.cli.bench.measure import PEERS


class Options(msgspec.Struct, frozen=True):
    """What to measure, and where to write the results.

    Attributes:
        ops: names of `OPS`.
        sizes: in bytes.
        dtypes: names of element types.
        peers: libraries to compare with xvcomm.
        in_place: whether results replace inputs, if an operation has both.
        seconds: time per case and library.
        iterations: number of iterations instead of `seconds`, or None.
        warmup: iterations before measuring.
        patience: seconds to wait for an idle machine before each turn.
        labels: an island label per rank, empty for none.
        json: file for the records, or None.
        plot: file for the plot, or None.
        csv: file for the records as comma-separated values, or None.
        devices: device type of each rank, empty for detection.
        budget: total seconds of all processes after which no further case is started, or None.
        measured: libraries that these processes measure, without a table if xvcomm is not among them; empty for xvcomm and all
            peers.
        others: files with the records of peers that other processes have measured.
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    in_place: bool
    seconds: float
    iterations: int | None
    warmup: int
    patience: float
    labels: tuple[str, ...]
    json: str | None
    plot: str | None
    csv: str | None = None
    devices: tuple[str, ...] = ()
    budget: float | None = None
    measured: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def separate(self) -> tuple[str, ...]:
        """The peers that need separate processes."""
        return tuple(name for name in self.peers if PEERS[name].environment)
