"""Either all ranks join or all learn the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from xvcomm.abc.store import Store
from xvcomm.errors import ArgumentError, ConfigError, DeadlineExceeded
from xvcomm.rendezvous.store import MemoryStore, join_barrier
from xvcomm.types.deadline import NEVER, Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
Opener = Callable[[], Store]


def join(store: Store, ranks: list[int], size: int, seconds: float = SOON) -> list[list[bytes] | BaseException]:
    def one(rank: int) -> list[bytes] | BaseException:
        try:
            return join_barrier(store, rank, size, b"info%d" % rank, Deadline.after(seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_everybody_gets_everything_in_rank_order(opener: Opener) -> None:
    assert join(opener(), [2, 0, 1], 3) == [[b"info0", b"info1", b"info2"]] * 3


def test_the_deciding_rank_stops_before_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end in words, not with a key of the store."""
    monkeypatch.setattr("xvcomm.rendezvous.store.join._SETTLE_SECONDS", 0.1)

    class TwoSteps(MemoryStore):
        decide = Store.decide

    store = TwoSteps()
    store.add("verdict/callers", 1)
    for result in join(store, [0, 1, 2], 3, 0.1):
        assert isinstance(result, DeadlineExceeded) and "decides whether all ranks have joined" in str(result)


def test_the_missing_are_named_on_all() -> None:
    for result in join(MemoryStore(), [0, 2], 5, 0.1):
        assert isinstance(result, DeadlineExceeded) and "ranks 1, 3, 4 of 5" in str(result)


def test_the_first_to_give_up_ends_it_for_all() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(join_barrier, store, 0, 3, b"", NEVER)
        for attempt in (1, 2):
            with pytest.raises(DeadlineExceeded, match="rank 2 of 3"):
                join_barrier(store, attempt, 3, b"", Deadline.after(0.05)) if attempt == 1 else patient.result(SOON)


def test_a_rank_that_comes_after_the_decision() -> None:
    store = MemoryStore()
    join(store, [0], 2, 0.05)
    with pytest.raises(DeadlineExceeded, match="rank 1 of 2"):
        join_barrier(store, 1, 2, b"", Deadline.after(SOON))


def test_two_of_one_number_end_it_for_all() -> None:
    results = join(MemoryStore(), [0, 1, 1], 4)
    for result in results:
        assert isinstance(result, ConfigError)
        assert str(result).count(f"process {os.getpid()} on") == 2 and "rank 1" in str(result)


def test_a_duplicate_does_not_stand_for_a_rank_that_is_missing() -> None:
    """As many have come as there are ranks, but not all ranks."""
    for _ in range(5):
        for result in join(MemoryStore(), [0, 1, 1], 3):
            assert isinstance(result, ConfigError) and "two processes are rank 1" in str(result)


def test_so_many_ranks_that_only_the_last_one_asks_for_all() -> None:
    everybody = list(range(70))
    assert join(MemoryStore(), everybody, 70) == [[b"info%d" % rank for rank in everybody]] * 70


def test_a_late_duplicate_rank_does_not_affect_others() -> None:
    store = MemoryStore()
    assert join(store, [0, 1], 2) == [[b"info0", b"info1"]] * 2
    with pytest.raises(ConfigError, match="two processes are rank 1"):
        join_barrier(store, 1, 2, b"", Deadline.after(SOON))


def test_many_ranks_and_long_lists_of_missing() -> None:
    (result,) = join(MemoryStore(), [0], 40, 0.05)
    assert "15, 16 and 23 more of 40" in str(result)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"rank {rank} of size 2"):
        join_barrier(MemoryStore(), rank, 2, b"", NEVER)
