"""Speed beside NCCL or RCCL, Gloo and plain copies: of collectives over all ranks, and of each kind of hop between two."""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.cli.bench.case import Case
from xvcomm.cli.bench.measure import PEERS, Bystanders, Contender, Effort, Meeting, Record, measure
from xvcomm.cli.bench.memory import Memory, memory_of
from xvcomm.cli.bench.peers import contenders
from xvcomm.cli.certify.contract import Finding, Plot, Result, Section, Table
from xvcomm.cli.certify.control import Control, describe
from xvcomm.cli.certify.job import Job
from xvcomm.cli.doctor import size_text
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import BackendUnavailable
from xvcomm.testing.arrays import Arrays, arrays
from xvcomm.types.dtype import BY_NAME, DType

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
_MESSAGES = ("p2p", "send")
_SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
_QUICK_SIZES = (8, 1 << 20)
_REMEDY = "results of this library were wrong while it was measured: see the section `operations`"


class DeviceMemory:
    """Memory of a device that no framework serves, for xvcomm alone; see `Memory`."""

    def __init__(self, comm: Communicator) -> None:
        self._arrays: Arrays = arrays(comm)
        self.kind = self.name = comm.device
        self.asynchronous = self._arrays.asynchronous

    def zeros(self, count: int, dtype: DType) -> Any:
        """See `Memory.zeros`."""
        return self._arrays.put(np.zeros(count, dtype.numpy))

    def tile(self, array: Any, values: NDArray[Any]) -> None:
        """See `Memory.tile`."""
        self._arrays.fill(array, np.resize(values, array.shape))

    def differ(self, array: Any, values: NDArray[Any]) -> int:
        """See `Memory.differ`."""
        found = self._arrays.get(array)
        return int(np.count_nonzero(found != np.resize(values, found.shape)))

    def synchronize(self) -> None:
        """See `Memory.synchronize`."""
        self._arrays.synchronize()


class _Bench:
    """Measures on some ranks, who agree among themselves."""

    def __init__(self, group: Communicator, job: Job, until: float) -> None:
        self._group, self._job, self._until = group, job, until
        self._meeting = Meeting(group.store, group.rank, group.size, group.timeout)
        self._memory: Memory = memory_of(group) if job.memory else DeviceMemory(group)
        self.notes: list[str] = []
        self.complete = True

    def records(self, ops: Sequence[str], sizes: Sequence[int]) -> list[Record]:
        """Measure operations over sizes until the time is over, the smallest sizes first."""
        meeting, seconds = self._meeting, 0.03 if self._job.quick else 0.08
        asynchronous = any(meeting.exchange(self._memory.asynchronous))
        effort = Effort(seconds, warmup=3, patience=0, asynchronous=asynchronous)
        where = meeting.exchange([os.uname().nodename, os.getpid()])
        watch = Bystanders([pid for node, pid in where if node == os.uname().nodename])
        folder = Config.from_env(os.environ).shm_dir
        file = meeting.exchange(f"{folder}/xvcomm-{Config.from_env(os.environ).job or os.getpid()}-{uuid.uuid4().hex}")[
            0
        ]
        libraries = self._libraries(file)
        found = list[Record]()
        try:
            for size in sizes:
                for op in ops:
                    if meeting.exchange(time.monotonic() > self._until)[0]:
                        self.complete = False
                        return found
                    case = Case(op, size, BY_NAME["float32"], self._group.size, in_place=True)
                    if case.count:
                        found += measure(case, libraries, meeting, self._memory, watch, effort)
            return found
        finally:
            for library in libraries:
                library.close()
            Path(file).unlink(missing_ok=True)

    def _libraries(self, file: str) -> list[Contender]:
        """xvcomm, and what can be measured beside it here."""
        job, found = self._job, list[Contender]()
        names = ["xvcomm"]
        if job.machines > 1:
            self.notes.append("other libraries are measured on one machine only")
        elif job.kinds == ["host"]:
            names += ["memcpy", *(["gloo"] if not job.torch else [])]
        elif len(job.kinds) == 1 and not job.torch:
            names += ["raw", "gloo", *(["nccl"] if job.own_devices else [])]
        if job.torch:
            self.notes.append(f"without Gloo and the vendor's library: {job.torch}")
        elif job.kinds != ["host"] and not job.own_devices:
            self.notes.append("without the vendor's library, which refuses two ranks on one GPU")
        for name in names:
            why = ""
            try:
                found += contenders([name], self._group, self._meeting, self._memory, file)
            except BackendUnavailable as error:
                why = str(error)
            if told := [text for text in self._meeting.exchange(why) if text]:
                self.notes.append(told[0])
                found = [library for library in found if library.name != name]
        return found


def _run(comm: Communicator, control: Control, job: Job, result: Result) -> None:
    sizes = _QUICK_SIZES if job.quick else _SIZES if job.kinds == ["host"] else (*_SIZES, 64 << 20)
    parts: list[tuple[str, list[int], tuple[str, ...]]] = [
        (f"collectives of {len(job.group_of(0))} ranks", job.group_of(0), _COLLECTIVES)
    ]
    parts += [(f"ranks {pair.a} and {pair.b}, {pair.hop}", [pair.a, pair.b], _MESSAGES) for pair in job.pairs]
    result.planned = len(parts)
    titled: dict[str, list[Record]] = {}
    for number, (title, members, ops) in enumerate(parts):
        if control.over():
            break
        control.told(result.done, result.planned, title)
        # The first part, of all ranks, takes as long as all pairs.
        left = control.until - time.monotonic()
        seconds = float(control.say(max(1.0, left / (len(parts) - number if number else 2))))
        note = _measure(comm, members, job, seconds, ops, sizes) if comm.rank in members else None
        for rank, (records, notes, complete, error) in control.notes(control.meet(note, seconds)):
            titled[title] = [Record(**record) for record in records]
            told = [finding.what for finding in result.findings]
            result.findings += [Finding(text, "", wrong=False) for text in notes if text not in told]
            if error:
                result.findings.append(Finding(f"{title}, rank {rank}: {error}", _REMEDY))
            result.done += bool(complete) and not error
        if comm.rank:
            result.done += 1
    _report(titled, job, result)


def _measure(
    comm: Communicator, members: Sequence[int], job: Job, seconds: float, ops: Sequence[str], sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], list[str], bool, str] | None:
    """Measure on some ranks; what the first of them leaves as its note: records, remarks, whether all was measured, an error."""
    group = comm.subgroup(members, "certify speed")
    try:
        bench = _Bench(group, job, time.monotonic() + seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about the names of other libraries' operations
            records = bench.records(ops, sizes)
        if group.rank:
            return None
        return [asdict(record) for record in records], list(dict.fromkeys(bench.notes)), bench.complete, ""
    except Exception as error:
        group.abort("certify: a measurement failed")
        return [], [], False, describe(error)
    finally:
        group.close()


def _report(titled: dict[str, list[Record]], job: Job, result: Result) -> None:
    """Make tables and plots of the records, and findings of wrong results."""
    for title, records in titled.items():
        for record in records:
            if record.wrong:
                what = (
                    f"{title}: {record.library}, {record.op} of {size_text(record.size)}: {record.wrong} elements wrong"
                )
                result.findings.append(Finding(what, _REMEDY, wrong=record.library == "xvcomm"))
        result.tables.append(_table(title, records))
        plots = {op: Plot(f"{op}, {title}", "GB/s") for op in dict.fromkeys(record.op for record in records)}
        for record in records:
            plots[record.op].lines.setdefault(record.library, []).append((record.size, record.busbw))
        result.plots += plots.values()
    if job.every_pair > len(job.pairs):
        what = f"{len(job.pairs)} of {job.every_pair} pairs were measured, each kind of hop among them"
        result.findings.append(Finding(what, "", wrong=False))


def _table(title: str, records: Sequence[Record]) -> Table:
    """A row for each operation and size: xvcomm's time and bandwidth, and the times of others as multiples of it."""
    others = [name for name in PEERS if any(record.library == name for record in records)]
    table = Table(title, ["operation", "bytes", "µs", "GB/s", *(f"{name}, times" for name in others)])
    for ours in records:
        if ours.library != "xvcomm":
            continue
        beside = {r.library: r.time for r in records if (r.op, r.size) == (ours.op, ours.size)}
        ratios = [f"{beside[name] / ours.time:.2f}" if name in beside else "" for name in others]
        noisy = " ~" if ours.noisy else ""
        table.rows.append([ours.op, size_text(ours.size), f"{ours.time:.1f}{noisy}", f"{ours.busbw:.2f}", *ratios])
    return table


def _needs(job: Job) -> str:
    return "" if job.size > 1 else "one rank sends nothing; start two or more"


SECTION = Section("speed", "Speed beside other libraries and plain copies, by pair and hop", 2.5, _needs, _run)
