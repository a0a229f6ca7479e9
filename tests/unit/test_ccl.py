"""NCCL and RCCL: the implementation of reductions, checks before joining, and how calls are aborted."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, create_autospec

import msgspec
import numpy as np
import pytest

from xvcomm.abc.collective import CollectiveForm, CollectiveStalled, CollectiveStopped
from xvcomm.abc.store import Store
from xvcomm.backends.ccl.collective import CclCollective
from xvcomm.backends.ccl.joining import Member, Verdict, join, meet, refusal
from xvcomm.backends.ccl.routes import Route, Scale, cut, parts, route
from xvcomm.backends.gpu.vendor import IN_PROGRESS, Addresses, Library, Runtime, VendorError
from xvcomm.backends.host.device import HostDevice
from xvcomm.config import Config
from xvcomm.errors import Aborted, BackendUnavailable, DeadlineExceeded
from xvcomm.memory.ring import Reason
from xvcomm.rendezvous.store import MemoryStore
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.testing.cases import expected, reductions, sample
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, DTYPES, UINT8, DType, ReduceOp, Reduction
from xvcomm.types.opcode import OpCode

SOON = 60.0
WHOLE = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
PLAIN = (*WHOLE, "float16", "bfloat16", "float32", "float64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
TABLES = {"without float8": PLAIN, "with float8": (*PLAIN, *FLOAT8)}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SUM = Reduction(ReduceOp.SUM)
F32 = BY_NAME["float32"]
Doing = Callable[..., Any]


def carried_out(how: Route, dtype: DType, op: ReduceOp, inputs: list[Any], factors: list[float]) -> Any:
    """The result of a route, computed by numpy."""
    members = len(inputs)
    if how.scale is Scale.BEFORE:
        scales = [1 / members] * members if op is ReduceOp.AVG else factors
        inputs = [(x * np.asarray(f).astype(x.dtype)).astype(x.dtype) for x, f in zip(inputs, scales, strict=True)]
    kind = how.native or dtype
    assert kind.itemsize * how.width == dtype.itemsize
    seen = [x.view(kind.numpy) for x in inputs]
    result = expected(how.op, kind, seen, factors).view(dtype.numpy)
    if how.scale is Scale.AFTER:
        wide = result.astype(np.float64) / members
        result = (np.trunc(wide) if dtype.kind in "iu" else wide).astype(dtype.numpy)
    return result


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routes_give_the_expected_results(dtype: DType, table: tuple[str, ...]) -> None:
    for op in reductions(dtype):
        how = route(dtype, op, table)
        assert how.native is None or how.native.name in table
        factors = [2.0, 1.0, 2.0, 1.0] if op is ReduceOp.PREMUL_SUM else [1.0] * 4
        unit = 4 if op is ReduceOp.AVG and dtype.kind not in "iu" else 1
        most = 1 if op is ReduceOp.PREMUL_SUM else 2
        inputs = [sample(dtype, 64, seed=member, most=most, unit=unit) for member in range(4)]
        got, want = carried_out(how, dtype, op, inputs, factors), expected(op, dtype, inputs, factors)
        np.testing.assert_array_equal(got.astype(complex), want.astype(complex), f"{op} of {dtype} by {how}")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_members_reduce_only_what_the_library_does_not_support(table: tuple[str, ...]) -> None:
    own = {(d.name, op) for d in DTYPES for op in reductions(d) if route(d, op, table).native is None}
    lacking = [d for d in DTYPES if d.kind in "fiu" and d.name not in table]
    assert own == (
        {(d.name, op) for d in lacking for op in reductions(d)}
        | {(name, op) for name in WHOLE for op in (*BITWISE, ReduceOp.PREMUL_SUM)}
        | {("bool", ReduceOp.BXOR), ("complex64", ReduceOp.PROD), ("complex128", ReduceOp.PROD)}
    )


def test_routes_through_another_dtype() -> None:
    assert route(BY_NAME["complex64"], ReduceOp.AVG, PLAIN) == Route(F32, ReduceOp.AVG, 2)
    assert route(BY_NAME["complex128"], ReduceOp.SUM, PLAIN) == Route(BY_NAME["float64"], ReduceOp.SUM, 2)
    assert route(BY_NAME["bool"], ReduceOp.SUM, PLAIN) == Route(UINT8, ReduceOp.MAX)
    assert route(BY_NAME["bool"], ReduceOp.BAND, PLAIN) == Route(UINT8, ReduceOp.MIN)
    assert route(BY_NAME["int32"], ReduceOp.AVG, PLAIN) == Route(BY_NAME["int32"], ReduceOp.SUM, scale=Scale.AFTER)
    # Where a sum may overflow, an average divides first.
    assert route(BY_NAME["float8_e5m2"], ReduceOp.AVG, PLAIN) == Route(None, ReduceOp.SUM, scale=Scale.AFTER)
    assert route(BY_NAME["float8_e5m2"], ReduceOp.PREMUL_SUM, PLAIN) == Route(None, ReduceOp.SUM, scale=Scale.BEFORE)
    assert route(BY_NAME["uint16"], ReduceOp.AVG, PLAIN) == Route(None, ReduceOp.SUM, scale=Scale.AFTER)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_shares_cover_an_array_and_begin_aligned(itemsize: int) -> None:
    for members in (1, 2, 3, 8):
        for count in (1, 5, 63, 64, 65, 1000, 4096 * members):
            shares = cut(count, members, itemsize)
            assert len(shares) == members and sum(shares) == count and min(shares) >= 0
            assert shares == sorted(shares, reverse=True)
            assert all(address % 64 == 0 for address, nbytes in parts(1 << 20, shares, itemsize) if nbytes)


def test_parts_lie_one_after_the_other() -> None:
    assert parts(1000, (3, 0, 2), 4) == [(1000, 12), (1012, 0), (1012, 8)]


def a_member(who: str, **different: Any) -> Member:
    fields: dict[str, Any] = {"library": "NCCL", "version": 22809, "dtypes": list(PLAIN), "gpu": f"of {who}"}
    return Member(who, **(fields | different))


def a_library(**results: Any) -> Mock:
    """A library whose calls do nothing and succeed immediately, except for these results."""
    library = create_autospec(Library, instance=True)
    library.name, library.least_version = "NCCL", 21800
    library.debug_hint = "NCCL_DEBUG=INFO tells more"
    ops = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
    answers = {
        "version": 22809, "unique_id": b"id", "join": 7, "state": 0, "explain": "ncclInternalError (3): because",
        "dtypes": {name: number for number, name in enumerate(PLAIN)},
        "ops": {op: number for number, op in enumerate(ops)},
    } | dict.fromkeys(("group_start", "group_end", "all_reduce", "reduce", "broadcast", "send", "recv"), 0)  # fmt: skip
    for name, result in (answers | results).items():
        how = {"side_effect": result} if callable(result) else {"return_value": result}
        getattr(library, name).configure_mock(**how)
    return library


def everybody(count: int, doing: Doing) -> list[Future[Any]]:
    """Run every member's function concurrently; returns their completed futures."""
    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(doing, me) for me in range(count)]


def meeting(members: list[Member], library: Mock) -> list[Future[Verdict]]:
    store = MemoryStore()
    count = len(members)
    return everybody(count, lambda me: meet(members[me], me, count, "native/0", store, Deadline.after(SOON), library))


def test_compatible_members_get_an_id_and_common_dtypes() -> None:
    library = a_library()
    members = [a_member("a"), a_member("b", dtypes=[*PLAIN, *FLOAT8]), a_member("c", dtypes=["uint8", "float32"])]
    verdicts = [future.result() for future in meeting(members, library)]
    assert verdicts == [Verdict("", ["float32", "uint8"], b"id")] * 3
    library.unique_id.assert_called_once_with()


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"version": 22602}, ["NCCL 2.28.9: a, c", "NCCL 2.26.2: b", "XVCOMM_ISLAND"]),
        ({"library": "RCCL"}, ["NCCL 2.28.9: a, c", "RCCL 2.28.9: b"]),
        ({"gpu": "of c"}, ["b and c are on one GPU (of c)", "XVCOMM_DEVICE_INDEX"]),
        ({"obstacle": "NCCL is too old"}, ["b: NCCL is too old"]),
    ],
    ids=["version", "library", "gpu", "obstacle"],
)
def test_incompatible_members_are_refused_before_the_library_is_called(
    different: dict[str, Any], words: list[str]
) -> None:
    library = a_library()
    futures = meeting([a_member("a"), a_member("b", **different), a_member("c")], library)
    for future in futures:
        with pytest.raises(BackendUnavailable) as caught:
            future.result()
        assert all(word in str(caught.value) for word in words), caught.value
    assert library.method_calls == []


@pytest.mark.parametrize(("come", "missing"), [((0, 2), (1, 3)), ((1, 2, 3), (0,)), ((1, 3), (0, 2))])
def test_missing_members_are_named_on_all(come: tuple[int, ...], missing: tuple[int, ...]) -> None:
    library, store, members = a_library(), MemoryStore(), [a_member(who) for who in "abcd"]

    def coming(i: int) -> Verdict:
        return meet(members[come[i]], come[i], 4, "native/0", store, Deadline.after(0.5), library)

    for future in everybody(len(come), coming):
        with pytest.raises(CollectiveStalled) as caught:
            future.result()
        assert caught.value.missing == missing


def test_a_single_member() -> None:
    assert refusal([a_member("a")]) == ""


def test_a_member_reports_its_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(rank=5)
    mine = Member.of(config, 2, a_library(), "0000:1b:00.0")
    assert mine.who.startswith("rank 5 on ") and mine.gpu.startswith("0000:1b:00.0, boot ") and not mine.obstacle
    assert Member.of(Config(), 2, a_library(), "").who.startswith("member 2 on ")
    assert "NCCL 2.10.3 is too old: install 2.18.0" in Member.of(config, 2, a_library(version=21003), "").obstacle
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    assert "unset it" in Member.of(config, 2, a_library(), "").obstacle


class PeerIsGone(Exception):
    """Raised by a session's check here."""


def gone() -> None:
    raise PeerIsGone


@pytest.mark.parametrize("lost", [False, True], ids=["deadline", "lost peer"])
def test_a_late_communicator_is_freed(lost: bool) -> None:
    may_come, freed = threading.Event(), Future[int]()

    def start() -> int:
        may_come.wait(SOON)
        return 7

    store: Store = MemoryStore()
    deadline = Deadline.after(0.2)
    if lost:
        store, deadline = GuardedStore("comm", store, gone), Deadline.after(SOON)
    error, match = (PeerIsGone, None) if lost else (DeadlineExceeded, r"call a collective such as barrier\(\)")
    with pytest.raises(error, match=match):
        join(start, freed.set_result, "joined/0", store, deadline)
    may_come.set()
    assert freed.result(SOON) == 7


def test_errors_of_joining_are_raised() -> None:
    error = VendorError("ncclCommInitRank", 2, "ncclSystemError", "no sockets")
    library = a_library(join=Mock(side_effect=error))
    with pytest.raises(BackendUnavailable, match=r"ncclCommInitRank: ncclSystemError.*NCCL_DEBUG"):
        joined(library)


CAPTURING_STREAM = 98


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int))
def is_capturing(stream: int, status: Any) -> int:
    status[0] = stream == CAPTURING_STREAM
    return 0


def joined(library: Mock, members: int = 1) -> CclCollective:
    """A communicator, seen from member 0."""
    runtime, store = create_autospec(Runtime, instance=True), MemoryStore()
    runtime.addresses.return_value = Addresses(ctypes.cast(is_capturing, ctypes.c_void_p).value or 0, 0, 0, 0, 0)
    for member in range(1, members):
        store.set(f"native/0/{member}", msgspec.json.encode(a_member(str(member))))
    return CclCollective(
        Config(), 0, members, "native/0", store, Deadline.after(SOON), library, runtime, HostDevice(Config()), "gpu"
    )


def stream(seconds: float = SOON) -> Any:
    return SimpleNamespace(handle=99, deadline=Deadline.after(seconds))


def form(op: OpCode, counts: tuple[int, ...], how: Reduction = SUM) -> CollectiveForm:
    return CollectiveForm(op, counts, (), F32, how, 0)


def all_reduce(comm: CclCollective, seconds: float = SOON) -> None:
    comm.run(form(OpCode.ALL_REDUCE, (10,)), 16, 32, stream(seconds))


class Blocking:
    """An all-reduce that blocks in the library until the communicator is aborted, and its abort."""

    def __init__(self) -> None:
        self.inside, self.aborted = threading.Event(), threading.Event()
        self.library = a_library(all_reduce=self._enter, abort=self._abort)
        self.comm = joined(self.library)

    def _enter(self, *_: int) -> int:
        self.inside.set()
        assert self.aborted.wait(SOON)
        return 3

    def _abort(self, comm: int) -> None:
        assert comm == 7
        self.aborted.set()


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    made = Blocking()
    yield made
    made.aborted.set()
    made.comm.close()


def until(condition: Callable[[], Any]) -> None:
    deadline = Deadline.after(SOON)
    while not condition():
        assert not deadline.expired()
        time.sleep(0.005)


def test_calls_use_the_librarys_numbers() -> None:
    library = a_library()
    comm = joined(library)
    all_reduce(comm)
    library.all_reduce.assert_called_once_with(16, 32, 10, PLAIN.index("float32"), 0, 7, 99)
    comm.run(form(OpCode.ALL_REDUCE, (0,)), 16, 32, stream())
    assert library.all_reduce.call_count == 1
    comm.close()


def test_abort_breaks_off_a_call_that_blocks(blocking: Blocking) -> None:
    word = Reason.PEER_LOST.word(1)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(all_reduce, blocking.comm)
        assert blocking.inside.wait(SOON)
        blocking.comm.abort(word)
        with pytest.raises(CollectiveStopped) as caught:
            under_way.result(SOON)
    assert caught.value.word == blocking.comm.error() == word


def test_error_breaks_off_a_call_past_its_deadline(blocking: Blocking) -> None:
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(all_reduce, blocking.comm, 0.1)
        assert blocking.inside.wait(SOON)
        until(lambda: blocking.comm.error() or under_way.done())
        with pytest.raises(CollectiveStalled):
            under_way.result(SOON)
    assert Reason.parse(blocking.comm.error())[0] is Reason.DEADLINE
    blocking.library.abort.assert_called_once_with(7)


def test_after_an_abort_the_first_reason_is_kept_and_no_call_is_made() -> None:
    library = a_library()
    comm = joined(library)
    comm.abort(Reason.LEFT.word(2))
    with pytest.raises(CollectiveStopped) as caught:
        all_reduce(comm)
    assert caught.value.word == Reason.LEFT.word(2)
    library.abort.assert_not_called()  # what is under way goes on
    for reason in (Reason.PEER_LOST, Reason.ABORTED, Reason.LEFT):
        comm.abort(reason.word(1))
    assert comm.error() == Reason.PEER_LOST.word(1)
    for _ in range(2):
        comm.close()
    library.abort.assert_called_once_with(7)
    library.destroy.assert_not_called()
    library.all_reduce.assert_not_called()


def test_an_abort_with_a_delay_lets_operations_go_on_and_no_call_begin() -> None:
    library = a_library()
    comm = joined(library)
    begun = time.monotonic()
    comm.abort(Reason.ABORTED.word(1), 0.2)
    with pytest.raises(CollectiveStopped):
        all_reduce(comm)
    until(lambda: library.abort.call_count)
    assert time.monotonic() - begun >= 0.2
    comm.close()


def test_close_destroys_once() -> None:
    library = a_library()
    comm = joined(library)
    for _ in range(2):
        comm.close()
    library.destroy.assert_called_once_with(7)
    library.abort.assert_not_called()
    with pytest.raises(CollectiveStopped):
        all_reduce(comm)


def test_a_failed_call_raises_the_librarys_text_or_the_abort_reason() -> None:
    library = a_library(all_reduce=3)
    comm = joined(library)
    with pytest.raises(Aborted, match=r"NCCL failed: ncclInternalError \(3\): because"):
        all_reduce(comm)
    library.all_reduce.return_value = 6  # a remote error: who it was is known a moment later
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(all_reduce, comm)
        until(lambda: library.all_reduce.call_count == 2)
        comm.abort(Reason.PEER_LOST.word(1))
        with pytest.raises(CollectiveStopped) as caught:
            under_way.result(SOON)
    assert caught.value.word == Reason.PEER_LOST.word(1)
    comm.close()


def test_asynchronous_errors_are_reported() -> None:
    library = a_library(state=IN_PROGRESS)
    comm = joined(library)
    assert comm.error() == 0
    library.state.return_value = 3
    assert Reason.parse(comm.error()) == (Reason.ABORTED, 0)
    assert "because" in comm.failure
    comm.close()


def test_ops_with_a_factor_are_cached_with_a_limit() -> None:
    made = iter(range(100, 1000))
    library = a_library(premul_sum=lambda *_: next(made))
    comm = joined(library)
    factors = [float(n) for n in range(100)]
    for factor in (*factors, factors[-1]):
        how = Reduction(ReduceOp.PREMUL_SUM, factor)
        comm.run(form(OpCode.ALL_REDUCE, (10,), how), 16, 32, stream())
    assert library.premul_sum.call_count == 100
    assert library.all_reduce.call_args.args[4] == 199
    assert library.free_op.call_count == 36
    comm.close()


def test_unequal_blocks_are_a_group_without_the_empty_ones() -> None:
    library = a_library()
    comm = joined(library, members=4)
    u8, f32 = PLAIN.index("uint8"), PLAIN.index("float32")
    comm.run(form(OpCode.ALL_GATHER, (2, 0, 0, 5)), 1000, 2000, stream())
    comm.run(form(OpCode.REDUCE_SCATTER, (2, 0, 0, 5)), 1000, 2000, stream())
    assert library.method_calls[-8:] == [
        call.group_start(),
        call.broadcast(1000, 2000, 8, u8, 0, 7, 99),
        call.broadcast(2008, 2008, 20, u8, 3, 7, 99),
        call.group_end(),
        call.group_start(),
        call.reduce(1000, 2000, 2, f32, 0, 0, 7, 99),
        call.reduce(1008, 0, 5, f32, 0, 3, 7, 99),
        call.group_end(),
    ]
    comm.close()


def test_a_group_is_closed_even_if_a_call_in_it_fails() -> None:
    library = a_library(broadcast=3)
    comm = joined(library, members=3)
    with pytest.raises(Aborted):
        comm.run(form(OpCode.ALL_GATHER, (4, 0, 8)), 16, 32, stream())
    assert [made[0] for made in library.method_calls[-4:-1]] == ["group_start", "broadcast", "group_end"]
    comm.close()
