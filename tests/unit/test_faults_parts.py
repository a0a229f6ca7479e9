"""Parts of failure handling: abort words, contract checks, guarded stores, rings that keep their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host.batch import Batch
from xvcomm.backends.host.collective import HostCollective
from xvcomm.backends.host.mover import Kind
from xvcomm.config import Config
from xvcomm.errors import (
    Aborted,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    ResourceError,
    StoreError,
    XvcommError,
)
from xvcomm.memory.ring import Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.rendezvous.store import MemoryStore, join_barrier
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.rendezvous.store.join import ended, refuse
from xvcomm.trace import groups, journal
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.contract import ContractCheck
from xvcomm.trace.format import State, read_history, region_bytes
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.snapshot import Group
from xvcomm.types.deadline import NEVER, Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode

Contracts = list[ContractCheck]
Ends = tuple[RingEnd, RingEnd]


def test_abort_words_tell_reason_rank_and_reporter() -> None:
    word = Reason.DEADLINE.word(70_000, 9)
    assert Reason.parse(word) == (Reason.DEADLINE, 70_000)
    assert Reason.reporter(word) == 9
    assert Reason.bad(word) and not Reason.bad(Reason.LEFT.word(3)) and not Reason.bad(0)


@pytest.fixture
def contracts() -> Iterator[Contracts]:
    """The same contract checks, as ranks 1, 4 and 6 see them."""
    ranks = (1, 4, 6)
    made = Segment.create("/dev/shm", "test_contract", ContractCheck.size(len(ranks)))
    segments = [made, *(Segment.attach("/dev/shm", made.name) for _ in ranks[1:])]
    recorders = [Recorder(memoryview(bytearray(region_bytes(16)))) for _ in ranks]
    found = [ContractCheck(s, ranks, r, recorder, 7) for s, r, recorder in zip(segments, ranks, recorders, strict=True)]
    yield found
    for contract in found:
        contract.close()


def call(nbytes: int) -> Message:
    return Message(int(OpCode.ALL_REDUCE), UINT8.code, nbytes, 0, 0)


def post(contract: ContractCheck, sequence: int, message: Message) -> bool:
    """Post a collective; returns whether it matches."""
    return contract.post(sequence, message, find_call_site(1)) >= 0


def test_a_contract_check_compares_whoever_comes_second(contracts: Contracts) -> None:
    assert post(contracts[0], 0, call(8)) and post(contracts[1], 0, call(8))
    assert contracts[0].absent(0) == [6] and contracts[2].absent(0) == [6]
    assert not post(contracts[2], 0, call(9))
    for contract in contracts:
        assert Reason.parse(contract.abort_word())[0] is Reason.MISMATCH
        assert contract.mismatch() in (((6, call(9)), (1, call(8))), ((6, call(9)), (4, call(8))))
        assert not post(contract, 1, call(8))


def test_a_post_is_noted_even_if_the_contract_check_is_aborted() -> None:
    made = Segment.create("/dev/shm", "test_contract", ContractCheck.size(1))
    memory = memoryview(bytearray(region_bytes(16)))
    contract = ContractCheck(made, (0,), 0, Recorder(memory), 7)
    first = contract.post(5, call(8), find_call_site(0))
    contract.abort(Reason.ABORTED.word(0))
    second = contract.post(6, call(16), find_call_site(0))
    assert (first, ~second) == (0, 1)
    noted = [(r.communicator, r.sequence, r.op, r.nbytes, r.peer, r.state) for r in read_history(memory)]
    assert noted == [(7, n, OpCode.ALL_REDUCE, size, -1, State.POSTED) for n, size in ((5, 8), (6, 16))]
    assert read_history(memory)[0].call_site.startswith("test_faults_parts.py:")
    contract.close()


def test_a_post_notes_the_newest_collective_of_its_communicator() -> None:
    """Also where the flight recorder keeps no record of it any more, but not once the communicator is aborted."""
    made = [Segment.create("/dev/shm", "test_contract", ContractCheck.size(1)) for _ in range(3)]
    memory = memoryview(bytearray(region_bytes(16)))
    recorder = Recorder(memory[:])
    recorder.note_group(Group(7, "0", (0, 1)))
    recorder.note_group(Group(8, "0.1", (0,)))
    first, other, unknown = (
        ContractCheck(s, (0,), 0, recorder, ident) for s, ident in zip(made, (7, 8, 9), strict=True)
    )
    for sequence in range(5):
        first.post(sequence, call(8), find_call_site(0))
    for sequence in range(64):
        assert unknown.post(sequence, call(8), find_call_site(0)) >= 0
    assert journal.state(memory).groups == (Group(7, "0", (0, 1), 4), Group(8, "0.1", (0,), -1))
    first.abort(Reason.ABORTED.word(0))
    first.post(5, call(8), find_call_site(0))
    other.post(0, call(8), find_call_site(0))
    recorder.close()
    other.post(1, call(8), find_call_site(0))
    assert [group.newest for group in groups.read(memory)] == [4, 0]
    for contract in (first, other, unknown):
        contract.close()


def test_a_contract_check_keeps_the_first_reason_and_its_words(contracts: Contracts) -> None:
    contracts[1].explain("é" * 5000)
    contracts[1].abort(Reason.ABORTED.word(4))
    contracts[0].abort(Reason.PEER_LOST.word(6))
    assert {contract.abort_word() for contract in contracts} == {Reason.ABORTED.word(4)}
    assert contracts[2].explanation(4) == "é" * 1024
    assert contracts[2].explanation(1) == "" and contracts[2].explanation(5) == ""


def test_a_contract_check_knows_who_left(contracts: Contracts) -> None:
    assert contracts[0].departures() == 0 and contracts[0].departed() == []
    contracts[2].leave()
    assert contracts[0].departures() == 1 and contracts[0].departed() == [6]


def test_waiting_in_a_guarded_store_ends_by_its_check() -> None:
    closed = threading.Event()

    def check() -> None:
        if closed.is_set():
            raise ClosedError("enough")

    store = GuardedStore("part", MemoryStore(), check)
    threading.Timer(0.05, closed.set).start()
    with pytest.raises(ClosedError):
        store.get("never", Deadline.after(20))


def test_waiting_in_a_guarded_store_ends_by_a_failure_elsewhere() -> None:
    base = MemoryStore()
    store = GuardedStore("part", base, lambda: None)
    threading.Timer(0.05, GuardedStore("part", base, lambda: None).fail, [Aborted("no room")]).start()
    with pytest.raises(Aborted, match="no room"):
        store.wait(["never"], Deadline.after(20))
    with pytest.raises(Aborted, match="no room"):
        store.check()
    with pytest.raises(DeadlineExceeded):
        GuardedStore("another part", base, lambda: None).get("never", Deadline.after(0.15))
    store.set("there", b"1")
    assert store.get("there", Deadline.after(0)) == b"1"


@pytest.mark.parametrize("kind", [PeerLost, DeadlineExceeded, Aborted])
def test_a_failure_elsewhere_keeps_its_kind_and_the_rank_that_caused_it(kind: type[XvcommError]) -> None:
    base = MemoryStore()
    GuardedStore("part", base, lambda: None).fail(kind("because of rank 3", peer=3))
    with pytest.raises(kind, match="because of rank 3") as caught:
        GuardedStore("part", base, lambda: None).get("never", Deadline.after(20))
    assert type(caught.value) is kind and caught.value.peer == 3


def test_a_rank_that_failed_and_closed_is_reported_with_its_error() -> None:
    def check() -> None:
        raise PeerLost("rank 3 left", peer=3)

    base = MemoryStore()
    GuardedStore("part", base, lambda: None).fail(Aborted("rank 3 found no room", peer=3))
    with pytest.raises(Aborted, match="rank 3 found no room"):
        GuardedStore("part", base, check).get("never", Deadline.after(20))


class _Unreachable(MemoryStore):
    def get(self, key: str, deadline: Deadline) -> bytes:
        raise StoreError("connection lost")

    def wait(self, keys: Iterable[str], deadline: Deadline) -> None:
        raise StoreError("connection lost")

    def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
        raise StoreError("connection lost")

    def add(self, key: str, amount: int, deadline: Deadline = NEVER) -> int:
        raise StoreError("connection lost")


@pytest.mark.parametrize("call", ["set", "get", "wait", "add"])
@pytest.mark.parametrize("dies", [True, False], ids=["its rank died", "nobody died"])
def test_a_guarded_store_that_cannot_be_reached(call: str, dies: bool) -> None:
    """The check reports shortly afterwards which rank failed; otherwise the store's error is raised."""
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if dies and checks == 3:
            raise PeerLost("rank 0 was lost", peer=0)

    store = GuardedStore("part", _Unreachable(), check)
    calls = {
        "set": lambda: store.set("key", b""), "get": lambda: store.get("key", Deadline.after(20)),
        "wait": lambda: store.wait(["key"], Deadline.after(20)), "add": lambda: store.add("key", 1),
    }  # fmt: skip
    with pytest.raises(PeerLost if dies else StoreError):
        calls[call]()


@pytest.mark.parametrize("error", [DeadlineExceeded, StoreError])
def test_a_store_that_is_slow_or_fails_says_nothing_of_ranks_that_have_ended(error: type[XvcommError]) -> None:
    """The rank goes on: its other requests to the store find the failure."""

    class Silent(MemoryStore):
        def get(self, key: str, deadline: Deadline = NEVER) -> bytes:
            raise error("it does not answer")

    assert ended(Silent()) == []


def test_a_rank_that_refuses_ends_the_waiting_of_the_others() -> None:
    store = MemoryStore()
    threading.Timer(0.05, refuse, (store, 1, ResourceError("no device"))).start()
    with pytest.raises(Aborted, match=r"rank 1 .* cannot join: ResourceError: no device"):
        join_barrier(store, 0, 2, b"", Deadline.after(20))
    with pytest.raises(Aborted):
        join_barrier(store, 1, 2, b"", Deadline.after(20))


def test_ranks_that_were_told_different_sizes_find_out_at_once() -> None:
    store = MemoryStore()
    errors: list[BaseException] = []

    def first() -> None:
        try:
            join_barrier(store, 0, 3, b"", Deadline.after(20))
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(ConfigError, match=r"rank 1 .* was given 2 as the number of ranks, rank 0 .* was given 3"):
        join_barrier(store, 1, 2, b"", Deadline.after(20))
    thread.join(10)
    assert "XVCOMM_SIZE" in str(errors[0])


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a ring in this process: producer, consumer."""
    layout = RingLayout(1, 4, 4096)
    made = Segment.create("/dev/shm", "test_parts", layout.size)
    producer = RingEnd.create(made, layout, peer=1, producer=True)
    consumer = RingEnd.open(Segment.attach("/dev/shm", made.name), peer=0, producer=False)
    made.unlink()
    yield producer, consumer
    producer.close()
    consumer.close()


def add(batch: Batch, kind: Kind, end: RingEnd, data: np.ndarray) -> None:
    batch.add(kind, end, data.ctypes.data, Message(int(OpCode.SEND), UINT8.code, data.nbytes, 0))


def test_transfers_of_one_end_keep_their_order_across_batches(ends: Ends) -> None:
    """The second batch is driven first, by another thread, and waits for its turn."""
    producer, consumer = ends
    sent = [np.full(30_000, i, np.uint8) for i in range(2)]
    got = [np.zeros(30_000, np.uint8) for _ in range(2)]
    out, first, second = Batch(100), Batch(100), Batch(100)
    for data in sent:
        add(out, Kind.PUT, producer, data)
    add(first, Kind.GET, consumer, got[0])
    add(second, Kind.GET, consumer, got[1])
    threads = [threading.Thread(target=batch.finish, args=(Deadline.after(20),)) for batch in (second, out)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert all(thread.is_alive() for thread in threads)
    first.finish(Deadline.after(20))
    for thread in threads:
        thread.join(20)
    assert [int(g[0]) for g in got] == [0, 1] and all((g == g[0]).all() for g in got)


def test_transfers_behind_an_abandoned_transfer_stop_with_the_ring(ends: Ends) -> None:
    producer, consumer = ends
    first, second = Batch(100), Batch(100)
    buffers = [np.full(16, 7, np.uint8) for _ in range(2)]
    add(first, Kind.GET, consumer, buffers[0])
    add(second, Kind.GET, consumer, buffers[1])
    with pytest.raises(RingStalled):
        first.finish(Deadline.after(0))
    # The message that is still to come belongs to the one given up, not to the next.
    late = Batch(100)
    add(late, Kind.PUT, producer, np.full(16, 1, np.uint8))
    late.finish(Deadline.after(5))
    threading.Timer(0.05, consumer.abort, (Reason.DEADLINE.word(0),)).start()
    with pytest.raises(RingStopped) as stopped:
        second.finish(Deadline.after(20))
    assert stopped.value.word == Reason.DEADLINE.word(0)
    assert all((b == 7).all() for b in buffers)


def test_an_arena_that_not_all_have_mapped_goes_with_the_first_that_leaves(tmp_path: Path) -> None:
    """A rank that maps it later learns why it is gone."""
    config, base = Config(shm_dir=str(tmp_path)), MemoryStore()

    def join(me: int, check: Callable[[], None]) -> HostCollective:
        return HostCollective(config, "arena", me, 3, "name", GuardedStore("part", base, check), Deadline.after(20))

    made = [join(me, lambda: None) for me in range(2)]
    assert len(list(tmp_path.iterdir())) == 1
    made[1].close()
    assert list(tmp_path.iterdir()) == []
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise CollectiveStopped(Reason.LEFT.word(1))

    with pytest.raises(CollectiveStopped):
        join(2, check)
    made[0].close()
