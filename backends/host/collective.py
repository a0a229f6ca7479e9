"""The native collective library of host memory: compiled kernels over an arena that the island's ranks share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xvcomm.abc.collective import Collective, CollectiveForm, CollectiveStalled, CollectiveStopped, PreparedCollective
from xvcomm.abc.device import Stream
from xvcomm.abc.partial_sums import SupportsPartialSums
from xvcomm.abc.store import NotSet, Store
from xvcomm.backends.host import direct, kernels, processes
from xvcomm.backends.host.kernels import MEMBER, PART, PLAN, Mode
from xvcomm.backends.host.reducers import BLOCK, finisher, kit, scaler, unrounded, widener
from xvcomm.config import Config
from xvcomm.errors import ResourceError
from xvcomm.jit.atomics import BUDGET, READY, STOPPED, budget_of_more
from xvcomm.jit.record import python_type
from xvcomm.memory.ring import ABORT, LINE
from xvcomm.memory.segment import PAGE, Segment, round_up
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import FLOAT32, DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

ONE_SHOT = 128 << 10
"""Maximum bytes for which two ranks all-reduce with one barrier, each reducing everything. With more ranks every rank reads the
arrays of all others, so the limit falls with the square of their number.
"""

_ATTACHED = 2 * LINE
_PLANS_KEPT = 1000
_SUM = Reduction(ReduceOp.SUM)
_COPIES = (OpCode.ALL_GATHER, OpCode.BROADCAST, OpCode.GATHER, OpCode.SCATTER, OpCode.ALL_TO_ALL)
_MODES = {OpCode.REDUCE_SCATTER: Mode.SCATTER, OpCode.REDUCE: Mode.ROOT}
_Plan, _Member = python_type(PLAN), python_type(MEMBER)
Kernel = Callable[[int, int, int], int]


class Plan(NamedTuple):
    """A collective of one shape, for any addresses.

    Attributes:
        record: a `kernels.PLAN`.
        parts: a `kernels.PART` per rank, which the record points to.
    """

    kernel: Kernel
    address: int
    record: Any
    parts: np.ndarray


def fair_blocks(count: int, ranks: int, itemsize: int) -> np.ndarray:
    """Offsets and bytes (2 x ranks) of the shares of `count` elements, aligned to cache lines."""
    grain = max(1, 64 // itemsize)
    share = round_up(-(-count // ranks), grain)
    cuts = np.minimum(np.arange(ranks + 1, dtype=np.int64) * share, count) * itemsize
    return np.ascontiguousarray(np.stack([cuts[:-1], np.diff(cuts)]))


def blocks(counts: Sequence[int], itemsize: int) -> np.ndarray:
    """Offsets and bytes (2 x ranks) of consecutive blocks."""
    sizes = np.asarray(counts, np.int64) * itemsize
    return np.ascontiguousarray(np.stack([np.cumsum(sizes) - sizes, sizes]))


def _attach(folder: str, size: int, store: Store, name: str, deadline: Deadline) -> Segment:
    """Map the arena that member 0 creates."""
    try:
        made = store.get(name, deadline).decode()
    except NotSet as error:
        raise CollectiveStalled((0,)) from error
    try:
        return Segment.attach(folder, made, size)
    except ResourceError:
        store.settle()  # member 0 may have died, or another member left: both unlink the arena
        raise


class _Scaled:
    """A scaled copy of an input, and memory for the sum of such copies: in float32 for low precision, rounded at the end.

    Entering returns the addresses and the dtype to use meanwhile.
    """

    def __init__(self, src: int, dst: int, count: int, results: int, dtype: DType, factor: float) -> None:
        self._src, self._dst, self._count, self._results = src, dst, count, results
        self._dtype, self._factor = dtype, factor
        self._wide = FLOAT32 if dtype.low_precision else dtype
        self._copy = np.empty(count * self._wide.itemsize, np.uint8)
        self._result = np.empty(results * self._wide.itemsize if dtype.low_precision else 0, np.uint8)

    def __enter__(self) -> tuple[int, int, DType]:
        low = self._dtype.low_precision
        convert = widener(self._dtype) if low else scaler(self._dtype)
        kernels.scale(convert, self._copy.ctypes.data, self._src, self._count, self._factor, 0)
        return int(self._copy.ctypes.data), int(self._result.ctypes.data) if low else self._dst, self._wide

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._result.size:
            kernels.scale(finisher(self._dtype), self._dst, self._result.ctypes.data, self._results, 1.0, 0)


class HostCollective(Collective, SupportsPartialSums):
    """One member's view of an island's shared arena. One call at a time.

    Attributes:
        access: whether the members can reach each other's memory.
        tunings: by kind of operation and class of sizes, how fast the ways were and which is chosen.
    """

    def __init__(
        self, config: Config, job: str, me: int, ranks: int, name: str, store: Store, deadline: Deadline
    ) -> None:
        """Map the arena that member 0 creates; the last member to map it unlinks its name."""
        self._me, self._ranks = me, ranks
        self._stage = max(config.stage_bytes, 64 * ranks)
        size = kernels.stages(ranks) + kernels.stage_count(ranks) * ranks * self._stage
        if me == 0:
            self._segment = Segment.create(config.shm_dir, job, size)
            with self._segment.named():
                store.set(name, self._segment.name.encode(), deadline)
        else:
            self._segment = _attach(config.shm_dir, size, store, name, deadline)
        self._arena = self._segment.address
        self._spins = int(config.spin_us * 500)
        self._pieces = np.zeros(1, np.int64)
        self._accumulator = np.empty(BLOCK * 16, np.uint8)
        self._room = direct.room(ranks)
        self.access = processes.Access()
        self.tunings: dict[tuple[Mode, int], Any] = {}
        processes.introduce(self.member(me).process, self.access, bool(config.process_memory))
        self._plans: dict[object, Plan] = {}
        if kernels.join(self._arena + _ATTACHED) == ranks - 1:
            self._segment.unlink()

    def run(self, form: CollectiveForm, src: int, dst: int, stream: Stream) -> None:
        if form.reduction.op is ReduceOp.PREMUL_SUM:
            count = sum(form.counts)
            results = count if form.op is not OpCode.REDUCE or form.root == self._me else 0
            results = form.counts[self._me] if form.op is OpCode.REDUCE_SCATTER else results
            with _Scaled(src, dst, count, results, form.dtype, form.reduction.factor) as (src, dst, dtype):
                self.run(form._replace(dtype=dtype, reduction=_SUM), src, dst, stream)
        else:
            self._run(self._plan_of(form, in_place=src == dst), src, dst, stream)

    def partial_sums(
        self, src: int, dst: int, counts: Sequence[int], dtype: DType, op: Reduction, stream: Stream
    ) -> None:
        form = CollectiveForm(OpCode.REDUCE_SCATTER, tuple(counts), (), dtype, op, 0)
        self._run(self._plan_of(form, in_place=False, rounds=False), src, dst, stream)

    def prepare(self, form: CollectiveForm) -> PreparedCollective | None:
        """See `Collective.prepare`; None for an operation that scales its input."""
        if form.reduction.op is ReduceOp.PREMUL_SUM:
            return None
        plan = self._plan_of(form, in_place=True)
        return PreparedCollective(kernels.address(plan.kernel), plan.address, partial(self._run, plan))

    def _plan_of(self, form: CollectiveForm, *, in_place: bool, rounds: bool = True) -> Plan:
        """The plan for a collective, kept for the next one of its shape; without `rounds`, the result is float32."""
        op, counts, recv_counts, dtype, reduction, root = form
        key = op, counts, recv_counts, dtype.code, reduction.op, root, in_place, rounds
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = self._exchange(form, in_place=in_place) if op in _COPIES else self._reduction(form, rounds=rounds)
            self._plans[key] = plan
        return plan

    def abort(self, word: int, delay: float = 0.0) -> None:
        if self._arena:
            cell = ctypes.c_int64.from_address(self._arena + ABORT)
            if not cell.value:
                cell.value = word

    def error(self) -> int:
        return ctypes.c_int64.from_address(self._arena + ABORT).value if self._arena else 0

    def close(self) -> None:
        if self._arena:
            self._segment.unlink()  # without this member it is useless to members that have not mapped it yet
            self._arena = 0
            self._segment.close()

    def _plan(self, kernel: Kernel, tables: np.ndarray | None, **words: int) -> Plan:
        """A plan with all words that do not vary between calls."""
        parts = np.zeros(self._ranks, PART)
        for name, row in zip(PART.names or (), tables if tables is not None else (), strict=False):
            parts[name] = row
        record = _Plan(
            arena=self._arena, ranks=self._ranks, me=self._me, stage=self._stage, spins=self._spins, budget=BUDGET,
            pieces=self._pieces.ctypes.data, scratch=self._accumulator.ctypes.data, parts=parts.ctypes.data,
            access=ctypes.addressof(self.access), **words,
        )  # fmt: skip
        return Plan(kernel, ctypes.addressof(record), record, parts)

    def _exchange(self, form: CollectiveForm, *, in_place: bool) -> Plan:
        op, counts, recv_counts, dtype, _, root = form
        me, itemsize = self._me, dtype.itemsize
        parts, columns = np.zeros((4, self._ranks), np.int64), 1
        match op:
            case OpCode.ALL_GATHER:
                parts[1, 0] = counts[me] * itemsize
                parts[2:] = blocks(counts, itemsize)
            case OpCode.BROADCAST:
                if me == root:
                    parts[1, 0] = counts[0] * itemsize
                if me != root or not in_place:
                    parts[3, root] = counts[0] * itemsize
            case OpCode.GATHER if me == root:
                parts[2:] = blocks(counts, itemsize)
            case OpCode.GATHER:
                parts[1, 0] = counts[me] * itemsize
            case OpCode.SCATTER:
                columns, parts[3, root] = self._ranks, counts[me] * itemsize
                if me == root:
                    parts[:2] = blocks(counts, itemsize)
            case OpCode.ALL_TO_ALL:
                columns, parts[:2], parts[2:] = self._ranks, blocks(counts, itemsize), blocks(recv_counts, itemsize)
        return self._plan(kernels.exchange, parts, columns=columns)

    def _reduction(self, form: CollectiveForm, *, rounds: bool) -> Plan:
        op, counts, _, dtype, reduction, root = form
        mode = _MODES.get(op, Mode.ALL)
        count = sum(counts)
        nbytes = count * dtype.itemsize
        kernel, words, table = kernels.reduce, {}, None
        if mode is Mode.ALL and nbytes <= min(ONE_SHOT // max(1, self._ranks - 1) ** 2, self._stage):
            kernel = kernels.one_shot
        else:  # each member reduces its share
            scatters = mode is Mode.SCATTER
            table = blocks(counts, dtype.itemsize) if scatters else fair_blocks(count, self._ranks, dtype.itemsize)
            if nbytes >= direct.LEAST:
                tuning = self.tunings.setdefault((mode, nbytes.bit_length()), direct.tuning())
                kernel = direct.reduce_either
                words = {"tuning": ctypes.addressof(tuning), "room": self._room.ctypes.data}
        functions = kit(dtype, reduction.base) if rounds else unrounded(dtype, reduction.base)
        divides = reduction.op is ReduceOp.AVG and self._ranks > 1
        return self._plan(
            kernel, table,
            mode=mode, root=root, pair=functions.pair, first=functions.first, more=functions.more, last=functions.last,
            finisher=finisher(dtype) if divides else 0, divisor=self._ranks, itemsize=dtype.itemsize,
            result_size=dtype.itemsize if rounds else FLOAT32.itemsize, nbytes=nbytes, **words,
        )  # fmt: skip

    def _run(self, plan: Plan, src: int, dst: int, stream: Stream) -> None:
        stream.synchronize()
        try:
            while True:
                code = plan.kernel(plan.address, src, dst)
                if code == READY:
                    plan.record.budget = BUDGET
                    return
                if code == STOPPED:
                    raise CollectiveStopped(self.error())
                if stream.deadline.expired():
                    raise CollectiveStalled(self._missing())
                plan.record.budget = budget_of_more(stream.deadline)
        except BaseException:
            direct.withdraw(plan.address)
            raise

    def _missing(self) -> list[int]:
        """Members that have passed fewer barriers than this one."""
        arrivals = [self.member(r).arrivals for r in range(self._ranks)]
        return [r for r, n in enumerate(arrivals) if n < arrivals[self._me]]

    def member(self, rank: int) -> Any:
        """A rank's line in the arena."""
        return _Member.from_address(self._arena + PAGE + rank * LINE)
