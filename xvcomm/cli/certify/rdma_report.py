"""What was found of RDMA between hosts: as findings, as tables, as JSON and as text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from xvcomm.cli.certify.contract import NOT_ALL, PROVEN, WRONG, Finding, Table
from xvcomm.cli.doctor import text_table

NIC, HOST = "nic", "host"
"""Where a half of a ring lies: in GPU memory that RDMA devices reach, or in host memory."""

_REMEDY = "follow docs/rdma.md, from `xvcomm doctor` on; XVCOMM_RDMA=0 turns RDMA off until it is right"
_LEAST_PART = 0.9
"""Of the bytes, which must go over the rails that are meant: frames and short messages may go over others."""
_LOST = "docs/rdma.md explains the warning, under 'While a job runs'; look at cable, switch and dmesg of both hosts"
_NOT_DIRECT = "docs/rdma.md explains the reasons, under 'Of GPU memory'; XVCOMM_DEVICE=host certifies RDMA without GPUs"
_WARNED = "docs/rdma.md explains it, under 'What the texts mean'"
_WIDTH = 170


@dataclass
class Side:
    """One end of a direction.

    Attributes:
        device: type of the rank's device.
        slots: NIC or HOST: where its half of the ring lies.
        rdma: whether it uses RDMA devices.
    """

    host: str
    rank: int
    device: str
    slots: str = ""
    rdma: bool = True

    def __str__(self) -> str:
        return f"{self.host} (rank {self.rank})"


@dataclass
class DevicePair:
    """What was found between a device of one host and one of another, in one direction, while no other devices carried.

    Attributes:
        source, target: both devices, with their ports.
        local, remote: addresses that they serve, between which WRITEs go.
        rails: how many queue pairs they have.
        compared, wrong: messages that were compared, and how many of them had wrong bytes.
        carried: part of the bytes that went over these rails.
        speed, plain: bytes a second of messages, and of WRITEs of one queue pair from and to memory of the same kind; None if
            these could not be measured.
        trouble: why not.
    """

    source: str
    target: str
    local: str
    remote: str
    rails: int
    compared: int = 0
    wrong: int = 0
    carried: float = 0.0
    speed: float = 0.0
    plain: float | None = None
    trouble: str = ""

    def findings(self) -> Iterator[Finding]:
        """What is wrong."""
        name = f"{self.source} to {self.target}"
        if self.wrong:
            yield Finding(f"{name}: {self.wrong} of {self.compared} messages wrong", _REMEDY)
        if self.carried < _LEAST_PART:
            yield Finding(f"{name}: only {self.carried:.0%} of the bytes went over their rails", _REMEDY)
        if self.trouble:
            yield Finding(f"{name}: no plain WRITEs: {self.trouble}", _REMEDY)


@dataclass
class Direction:
    """What was found from one rank to another.

    Attributes:
        rails: of RDMA, by both ends' addresses and number, at the beginning.
        compared, wrong: messages over all rails that were compared, and how many of them had wrong bytes.
        speed: bytes a second of messages over all rails.
        by_rdma: part of all messages' bytes that went over RDMA, of those too that each pair of devices carried.
        lost: connections that were lost meanwhile, each with how often; most of them were replaced.
        pairs: of devices.
    """

    source: Side
    target: Side
    rails: list[str] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    speed: float = 0.0
    by_rdma: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)
    pairs: list[DevicePair] = field(default_factory=list)

    def findings(self) -> Iterator[Finding]:
        """What is wrong."""
        name = f"{self.source} to {self.target}"
        if not self.rails:
            why = "".join(f"; {side} uses no RDMA device" for side in (self.source, self.target) if not side.rdma)
            yield Finding(f"{name}: no rail of RDMA has come up{why}", _REMEDY)
        if self.wrong or not self.compared:
            yield Finding(f"{name}: {self.wrong} of {self.compared} messages wrong", _REMEDY)
        if self.rails and self.by_rdma < _LEAST_PART:
            yield Finding(f"{name}: only {self.by_rdma:.0%} of the bytes went by RDMA", _REMEDY)
        for ends, times in self.lost.items():
            often = f", {times} times" if times > 1 else ""
            yield Finding(f"{name}: a connection was lost{often}: {ends}", _LOST)
        for pair in self.pairs:
            yield from pair.findings()


@dataclass
class Report:
    """All directions between hosts.

    Attributes:
        grades: how far each device came with the memory of each GPU, in each direction, and why no further.
        warnings: of xvcomm on the ranks meanwhile, with their hosts.
    """

    date: str
    versions: dict[str, str]
    hosts: list[str]
    directions: list[Direction]
    grades: list[dict[str, str]]
    warnings: list[str]

    def findings(self) -> Iterator[Finding]:
        """What is wrong; then, as notes, where Device-Direct is not in use, and warnings."""
        for direction in self.directions:
            yield from direction.findings()
        yield from self._not_direct()
        for warning in self.warnings:
            yield Finding(warning, _WARNED, wrong=False)

    def _not_direct(self) -> Iterator[Finding]:
        """A note for each rank's GPU, and what its devices do with its memory, where rings lie in host memory."""
        halves = {
            (str(d.source), "reads") for d in self.directions if d.source.device != "host" and d.source.slots == HOST
        }
        halves |= {
            (str(d.target), "writes") for d in self.directions if d.target.device != "host" and d.target.slots == HOST
        }
        for side, direction in sorted(halves):
            why = [
                f"{grade['device']} came as far as {grade['grade'] or 'nothing'}: {grade['reason']}"
                for grade in self.grades
                if grade["side"] == side and direction in grade["direction"] and grade["grade"] != "direct"
            ]
            told = "; ".join(why) or "no device was tried, or its warning tells why"
            yield Finding(f"{side}: no Device-Direct where devices do {direction}: {told}", _NOT_DIRECT, wrong=False)

    @property
    def code(self) -> int:
        """The exit code."""
        if any(finding.wrong for finding in self.findings()):
            return WRONG
        return PROVEN if self.directions and not any(self._not_direct()) else NOT_ALL

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if not self.directions:
            return "All ranks are on one host: there is nothing to certify. Start it as the ranks of a job on several hosts."
        told = {PROVEN: "Passed.", WRONG: "FAILED.", NOT_ALL: "Nothing wrong, but no Device-Direct everywhere."}
        return told[self.code]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **asdict(self), "findings": [asdict(finding) for finding in self.findings()], "code": self.code,
            "verdict": self.verdict,
        }  # fmt: skip

    def tables(self) -> Iterator[Table]:
        """Directions, pairs of devices, and grades."""
        yield self._of_directions()
        yield self._of_pairs()
        columns = ["side", "device", "direction", "grade", "reason"]
        rows = [[grade[column] for column in columns] for grade in self.grades]
        yield Table("RDMA devices and GPU memory (docs/rdma.md explains the grades)", columns, rows)

    def _of_directions(self) -> Table:
        columns = ["from", "to", "rails", "lost", "slots", "wrong messages", "GB/s", "by RDMA", "result"]
        table = Table(f"RDMA, {self.date}", columns)
        for found in self.directions:
            wrong = found.wrong + sum(pair.wrong for pair in found.pairs)
            compared = found.compared + sum(pair.compared for pair in found.pairs)
            failed = any(finding.wrong for finding in found.findings())
            table.rows.append(
                [
                    str(found.source), str(found.target), f"{len(found.rails)}", f"{sum(found.lost.values())}",
                    f"{found.source.slots} to {found.target.slots}", f"{wrong} of {compared}", _speed(found.speed),
                    f"{found.by_rdma:.0%}", "FAILED" if failed else "passed",
                ]
            )  # fmt: skip
        return table

    def _of_pairs(self) -> Table:
        columns = ["from", "to", "rails", "wrong messages", "GB/s", "plain WRITEs", "ratio", "over these rails"]
        table = Table("Each pair of devices alone", columns)
        for direction in self.directions:
            for found in direction.pairs:
                ratio = "" if not found.plain else f"{found.speed / found.plain:.2f}"
                table.rows.append(
                    [
                        f"{direction.source.host}: {found.source}", f"{direction.target.host}: {found.target}",
                        f"{found.rails}", f"{found.wrong} of {found.compared}", _speed(found.speed), _speed(found.plain),
                        ratio, f"{found.carried:.0%}",
                    ]
                )  # fmt: skip
        return table


def write(report: Report, out: Path | None) -> None:
    """Print the report, and write it into a folder."""
    consoles = [Console()]
    with contextlib.ExitStack() as files:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "certify-rdma.json").write_text(json.dumps(report.plain(), indent=1) + "\n")
            text = files.enter_context((out / "certify-rdma.txt").open("w"))
            consoles.append(Console(file=text, width=_WIDTH))
        for console in consoles:
            _show(report, console)


def _show(report: Report, console: Console) -> None:
    told = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{', '.join(report.hosts)}; {told}", highlight=False, markup=False, soft_wrap=True)
    for made in report.tables():
        if made.rows:
            table = text_table(made.title, made.columns, made.rows)
            console.print(table, highlight=False, markup=False)
    for finding in report.findings():
        told = f"{'WRONG' if finding.wrong else 'note'}: {finding.what}\n    What to do: {finding.remedy}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    console.print(report.verdict, highlight=False, markup=False, soft_wrap=True)


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed / 1e9:.3f}"
