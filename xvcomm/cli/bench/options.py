"""What `xvcomm bench` was asked for, as the command tells it to the ranks."""

from __future__ import annotations

import msgspec

from xvcomm.cli.bench.measure import PEERS


class Options(msgspec.Struct, frozen=True):
    """What to measure and where to put it, as it travels to the ranks.

    Attributes:
        ops: names of `OPS`.
        sizes: bytes.
        dtypes: element types by name.
        peers: libraries to measure beside xvcomm.
        in_place: whether results replace inputs, where an operation has both.
        seconds: time for each case and library.
        iterations: instead of `seconds`, or None.
        warmup: iterations before measuring.
        patience: seconds to wait for a calm machine before each turn.
        labels: an island label a rank, empty for none.
        json: file for the records, or None.
        plot: file for the picture, or None.
        csv: file for the records as comma-separated values, or None.
        devices: kind of device of each rank, empty for what is found.
        budget: seconds, of all processes together, after which no other case is begun, or None.
        measured: what these processes measure, without a table if xvcomm is not among it; empty for xvcomm and peers.
        others: files with the records of peers that other processes measured.
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
        """The peers that need processes of their own."""
        return tuple(name for name in self.peers if PEERS[name].environment)
