"""Waits of ranks, and the verdict, derived from the flight recorders of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from xvcomm.trace import groups, stack
from xvcomm.trace.format import Life, Record, State
from xvcomm.trace.report import hop, report
from xvcomm.trace.snapshot import Group, RankState, Snapshot
from xvcomm.trace.verdict import judge
from xvcomm.trace.waits import Condition, Waits, Why
from xvcomm.types.opcode import OpCode
from xvcomm.types.topology import RankInfo

NOW = 10**18
WORLD = Group(7, "0", (0, 1, 2, 3))
STACK = """Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 700 in read
  File "/home/me/train.py", line 55 in load
  File "/usr/lib/python3.11/site-packages/xvcomm/testing/processes.py", line 3 in obey
"""
INSIDE = """Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in get
  File "/usr/lib/python3.11/site-packages/xvcomm/engine/collectives.py", line 1 in run
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in all_reduce
  File "/home/me/train.py", line 56 in step
"""


def record(op: OpCode, sequence: int, *, peer: int = -1, done: bool = False, ago: float = 2.0, **more: int) -> Record:
    posted = NOW - round(ago * 1e9)
    state, ended = (State.DONE, posted + 1000) if done else (State.POSTED, 0)
    words = {"communicator": 7, "dtype": 10, "nbytes": 64, "tag": -1, "state": int(state), **more}
    return Record(sequence=sequence, op=int(op), peer=peer, posted=posted, ended=ended, call_site="train.py:9", **words)


def waits(*ranks: Sequence[Record] | RankState, hosts: str = "aaaa", device: str = "host") -> Waits:
    infos = tuple(RankInfo(r, hosts[r], f"node-{hosts[r]}", 100 + r, device, device) for r in range(4))
    states = [r if isinstance(r, RankState) else RankState(groups=(WORLD,), records=tuple(r)) for r in ranks]
    return Waits(Snapshot("job", NOW, infos, dict(enumerate(states))))


def before(*more: Record) -> list[Record]:
    return [record(OpCode.BARRIER, 0, done=True, ago=5), *more]


SUM = record(OpCode.ALL_REDUCE, 1)


def test_a_rank_that_computes() -> None:
    found = waits(
        before(SUM), before(SUM), RankState(groups=(WORLD,), records=tuple(before()), stack=STACK), before(SUM)
    )
    verdict = judge(found)
    assert verdict.ranks == (2,) and not verdict.cycle
    assert (
        verdict.text.startswith("Rank 2 never called all_reduce #1 of ") and "ranks 0, 1 and 3 are in" in verdict.text
    )
    assert "in read (python3.11/socket.py:700) called in load (me/train.py:55)" in verdict.text


def test_ends_that_are_not_calls() -> None:
    for state, words in (
        (
            RankState(groups=(WORLD,), records=tuple(before()), ending="killed by SIGKILL"),
            "rank 2 has ended (killed by SIGKILL)",
        ),
        (RankState(groups=(WORLD,), records=tuple(before()), life=Life.CLOSED), "rank 2 has left in good order"),
        (RankState(groups=(WORLD,), records=tuple(before()), stopped=True), "rank 2 is stopped by a signal"),
        (RankState(answered=False), "rank 2 on node-a does not answer"),
        (
            RankState(groups=(WORLD,), records=tuple(before()), answered=False),
            "rank 2 does not answer; its last operation",
        ),
    ):
        verdict = judge(waits(before(SUM), before(SUM), state, before(SUM)))
        assert verdict.ranks == (2,) and words in verdict.text, verdict.text


def test_of_several_ends_the_one_that_says_most_is_named() -> None:
    gone = RankState(groups=(WORLD,), records=tuple(before()), ending="it has ended")
    assert judge(waits(before(SUM), before(), gone, before())).ranks == (2,)


def test_a_cycle_with_a_collective_names_the_rank_that_is_elsewhere() -> None:
    verdict = judge(waits(before(SUM), before(SUM), before(record(OpCode.RECV, 1, peer=0)), before(SUM)))
    assert verdict.ranks == (2,) and len(verdict.cycle) == 2
    assert "rank 2 is in recv from rank 0" in verdict.text and verdict.text.endswith("and waits for rank 0.")


def test_a_cycle_of_messages() -> None:
    verdict = judge(waits(*(before(record(OpCode.SEND, 1, peer=(r + 1) % 4)) for r in range(4))))
    assert verdict.ranks == (0, 1, 2, 3) and verdict.text.startswith("Ranks 0-3 wait in a cycle. Rank ")


def test_a_message_whose_other_end_is_there_is_not_waited_for() -> None:
    found = waits(before(record(OpCode.SEND, 1, peer=1)), before(record(OpCode.RECV, 1, peer=0)), before(), before())
    assert {w.why for of_rank in found.all.values() for w in of_rank} == {Why.INSIDE}
    assert "No rank holds it up" in judge(found).text


def test_a_message_that_the_host_has_not_seen_end_is_no_other_end() -> None:
    """GPUs have passed a message before a collective; the host of one of them has seen that, the other's not yet."""
    passed, unseen = record(OpCode.RECV, 0, peer=1, done=True, ago=4), record(OpCode.SEND, 0, peer=0, ago=4)
    third = before(SUM)
    verdict = judge(waits(
        [passed, *before(record(OpCode.RECV, 1, peer=1), SUM)], [unseen, *before(record(OpCode.RECV, 1, peer=0), SUM)],
        third, third, device="cuda",
    ))  # fmt: skip
    assert verdict.text.startswith("Ranks 0 and 1 wait for each other"), verdict.text


def test_a_message_sent_before_a_collective_is_an_other_end() -> None:
    """Its receiver calls the collective first."""
    found = waits(before(record(OpCode.RECV, 2, peer=1)), before(record(OpCode.SEND, 1, peer=0, ago=3), SUM), [], [])
    assert found.all[0][0].why is Why.INSIDE


def test_calls_that_differ() -> None:
    found = waits(before(SUM), before(SUM), before(record(OpCode.ALL_REDUCE, 1, nbytes=128)), before(SUM))
    verdict = judge(found)
    assert verdict.text.startswith("The ranks made different calls: rank 0 called all_reduce #1")
    difference = found.first_difference()
    assert difference is not None and [rank for rank, _ in difference] == [0, 2]


def test_an_operation_that_has_just_failed_is_waited_in() -> None:
    failed = record(OpCode.ALL_REDUCE, 1, state=int(State.FAILED))
    ended = Record(**{f: getattr(failed, f) for f in failed.__slots__} | {"ended": NOW - 10**9})
    long_ago = Record(
        **{f: getattr(failed, f) for f in failed.__slots__} | {"ended": NOW - 10**11, "posted": NOW - 2 * 10**11}
    )
    assert judge(waits(before(ended), before(), before(), before())).ranks == (1, 2, 3)
    assert judge(waits(before(long_ago), before(), before(), before())).text == "No rank waits for another one."


def test_ranks_whose_records_of_a_communicator_are_overwritten() -> None:
    """The number of the newest collective of each communicator is kept apart from the records."""
    fifth, many = record(OpCode.BARRIER, 5, communicator=8), tuple(before())

    def verdict(newest: int | None) -> str:
        """Of three ranks that are in a barrier, and one that has called collectives to a number."""
        both = [(WORLD, Group(8, "0.1", (0, 1, 2, 3), number)) for number in (5, 5, newest, 5)]
        records = [(*many, fifth), (*many, fifth), many, (*many, fifth)]
        return judge(
            waits(*(RankState(groups=g, records=r, dropped=9) for g, r in zip(both, records, strict=True)))
        ).text

    for newest in (-1, 4):
        assert verdict(newest).startswith("Rank 2 never called barrier #5 on communicator 0.1")
    assert verdict(5).startswith("All ranks have come to barrier #5 on communicator 0.1")
    assert verdict(None).endswith("Others may hold it up: rank 2.") and "All ranks have" not in verdict(None)


def test_a_communicator_of_which_no_rank_has_told() -> None:
    inside = RankState(records=(record(OpCode.BARRIER, 5, communicator=8),), dropped=9)
    away = RankState(records=(record(OpCode.BARRIER, 9, communicator=9, done=True),), dropped=9)
    verdict = judge(waits(inside, inside, away, inside))
    assert verdict.text.startswith("Nothing is known of the communicator of barrier #5 that ranks 0, 1 and 3 are in")
    assert verdict.text.endswith("Others may hold it up.") and not verdict.ranks


def test_the_oldest_wait_of_hosts_whose_clocks_differ() -> None:
    """Rank 0 waits for rank 1 since 5 seconds, and rank 2 for rank 3 since 2: the clock of its host is a minute behind."""
    minute = 60 * 10**9
    late = replace(record(OpCode.RECV, 1, peer=3), posted=NOW - 2 * 10**9 - minute)
    behind = RankState(groups=(WORLD,), records=(late,), ahead=-minute)
    found = waits([record(OpCode.RECV, 1, peer=1, ago=5)], before(), behind, before(), hosts="aabb")
    verdict = judge(found)
    assert verdict.ranks == (1,) and "rank 0 is in since 5.0 s" in verdict.text, verdict.text
    assert judge(found, rank=2).ranks == (3,) and "rank 2 is in since 2.0 s" in judge(found, rank=2).text


def test_the_first_difference_of_hosts_whose_clocks_differ() -> None:
    minute = 60 * 10**9
    first = [record(OpCode.BARRIER, 3, ago=9), record(OpCode.BARRIER, 1, communicator=8, ago=5)]
    other = [record(OpCode.BROADCAST, 3, ago=9), record(OpCode.BROADCAST, 1, communicator=8, ago=5)]
    behind = [replace(one, posted=one.posted - minute) for one in (other[1], other[1])]
    states = [RankState(records=(first[0],)), RankState(records=(other[0],)),
              RankState(records=(behind[0],), ahead=-minute), RankState(records=(first[1],))]  # fmt: skip
    difference = waits(*states, hosts="aabb").first_difference()
    assert difference is not None and [rank for rank, _ in difference] == [0, 1]


def test_a_rank_that_waits_in_something_unknown() -> None:
    """Nothing is known of the communicator in which the sender is."""
    unknown = before(record(OpCode.BARRIER, 0, communicator=9))
    verdict = judge(waits(before(record(OpCode.RECV, 1, peer=1)), unknown, [], []))
    assert verdict.ranks == (1,)
    assert verdict.text.startswith("Rank 1 does not send in the recv from rank 1 of "), verdict.text
    assert "rank 1 is in barrier #0" in verdict.text and verdict.text.endswith("others may hold it up.")
    # Rank 2 receives what rank 1 sends, which also waits for rank 3.
    sends = before(record(OpCode.SEND, 1, peer=2), record(OpCode.RECV, 1, peer=3))
    verdict = judge(
        waits(before(record(OpCode.RECV, 1, peer=1)), sends, before(record(OpCode.RECV, 1, peer=1)), unknown)
    )
    assert verdict.ranks == (3,), verdict.text


def test_a_slow_operation_of_others_is_told_of_and_names_no_rank() -> None:
    both = (WORLD, Group(8, "0.1", (1, 2, 3)))
    inside = RankState(groups=both, records=tuple(before(record(OpCode.ALL_REDUCE, 0, communicator=8))))
    verdict = judge(waits(RankState(groups=both, records=tuple(before(SUM))), inside, inside, inside))
    assert verdict.ranks == () and "No rank holds it up" in verdict.text
    assert "come to all_reduce #0 of 32 x int16 on communicator 0.1 of ranks 1-3 that ranks 1-3 are in" in verdict.text


def test_what_a_stack_says_of_a_rank_with_operations_under_way() -> None:
    pending = tuple(before(record(OpCode.RECV, 1, peer=1)))
    for text, condition in ((STACK, Condition.ELSEWHERE), (INSIDE, Condition.WAITS), ("", Condition.WAITS)):
        found = waits(RankState(groups=(WORLD,), records=pending, stack=text), before(), before(), before())
        assert found.condition(0) is condition
    on_gpu = waits(
        RankState(groups=(WORLD,), records=pending, stack=STACK), before(), before(), before(), device="cuda"
    )
    assert on_gpu.condition(0) is Condition.WAITS  # it may wait for its GPU
    assert stack.parse("") is None and not stack.busy("")


def test_collectives_of_gpus_in_different_orders() -> None:
    """Each rank has enqueued both; neither GPU begins the second one."""
    first, second = record(OpCode.ALL_REDUCE, 1, ago=3), record(OpCode.ALL_REDUCE, 1, ago=2, communicator=8)
    swapped = record(OpCode.ALL_REDUCE, 1, ago=3, communicator=8), record(OpCode.ALL_REDUCE, 1, ago=2)
    pair = (Group(7, "0.1", (0, 1)), Group(8, "0.2", (0, 1)))
    states = (RankState(groups=pair, records=(first, second)), RankState(groups=pair, records=swapped))
    verdict = judge(waits(*states, RankState(), RankState(), device="cuda"))
    assert verdict.ranks == (0, 1) and "call collectives of several communicators in different orders" in verdict.text
    assert "No rank holds it up" in judge(waits(*states, RankState(), RankState())).text


def test_the_report_tells_of_every_rank() -> None:
    gone = RankState(groups=(WORLD,), records=tuple(before()), ending="it has ended")
    found = waits(
        before(SUM), before(record(OpCode.RECV, 1, peer=3)), RankState(groups=(WORLD,), stack=STACK), gone, hosts="aabb"
    )
    text = report(found.snapshot, judge(found), found)
    assert "rank 0 (host on node-a): all_reduce #1" in text and "a ring between hosts; waits for 3" in text
    assert "rank 2 is outside xvcomm" in text and "load (me/train.py:55)" in text and "rank 3 has ended" in text


def test_hops() -> None:
    infos = tuple(
        RankInfo(r, host, host, 1, device, island)
        for r, (host, device, island) in enumerate(
            [("a", "cuda", "n"), ("a", "cuda", "n"), ("a", "rocm", "m"), ("b", "rocm", "m")]
        )
    )
    assert hop(SUM, WORLD, 0, infos) == "the native library + rings between hosts + rings in shared memory"
    assert hop(SUM, Group(7, "x", (0, 1)), 0, infos) == "the native library"
    assert hop(record(OpCode.SEND, 1, peer=3), WORLD, 0, infos) == "a ring between hosts"
    assert hop(record(OpCode.SEND, 1, peer=1), WORLD, 0, infos) == "a ring in shared memory"


@given(st.lists(st.integers(0, 3000), unique=True, max_size=40), st.text(max_size=30))
def test_places_of_communicators(ranks: list[int], name: str) -> None:
    memory = memoryview(bytearray(20000))
    group = Group(5, name.replace("\0", ""), tuple(ranks))
    assert groups.write(memory, group)
    found = groups.read(memory)
    if ranks:
        assert found[0].ident == 5 and found[0].ranks in (group.ranks, ())
    groups.erase(memory, 5)
    assert groups.read(memory) == ()


def test_ranks_in_brief() -> None:
    for ranks, text in (
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4, 9), "0-4/2,9"),
        ((3, 1), "3,1"),
        ((5,), "5"),
        (tuple(range(0, 2000, 8)), "0-1992/8"),
    ):
        memory = memoryview(bytearray(20000))
        assert groups.brief(ranks) == text
        assert groups.write(memory, Group(1, "dp", ranks)) and groups.read(memory) == (Group(1, "dp", ranks, -1),)


def test_more_communicators_than_places() -> None:
    memory = memoryview(bytearray(20000))
    written = [groups.write(memory, Group(i + 1, str(i), (0, 1))) for i in range(130)]
    assert written.count(True) == 120 == len(groups.read(memory))
    assert groups.newest_at(memory, 120) and not groups.newest_at(memory, 121)
    groups.erase(memory, 5)
    assert groups.write(memory, Group(199, "new", (0, 1))) and not groups.write(memory, Group(200, "new", (0, 1)))
