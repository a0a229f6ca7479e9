"""Snapshots as timelines: what belongs together, and the structure that Perfetto reads."""

from __future__ import annotations

import itertools
import json
import random
import runpy
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm.trace.format import Record, Share, State
from xvcomm.trace.snapshot import Group, Snapshot
from xvcomm.trace.spans import groups, messages, spans
from xvcomm.trace.timeline import timeline
from xvcomm.types.opcode import OpCode

_made = runpy.run_path(str(Path(__file__).with_name("snapshots.py")))
record, snapshot, WORLD = _made["record"], _made["snapshot"], _made["WORLD"]
SEND, RECV, ALL_REDUCE = OpCode.SEND, OpCode.RECV, OpCode.ALL_REDUCE


def read_back(taken: Snapshot) -> list[dict[str, Any]]:
    """The events, after a check of everything that the format demands."""
    trace = json.loads(msgspec.json.encode(timeline(taken)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys() and event["ph"] in "MXstf"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["ts"] >= 0
    slices: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of(events, "X"):
        assert event["dur"] >= 0
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():
        track.sort()
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(track))
    threads = {(event["pid"], event["tid"]) for event in of(events, "M") if event["name"] == "thread_name"}
    assert threads == slices.keys()
    check_flows(events, slices)
    return events


def check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Each arrow begins once and ends once, and lies on operations."""
    flows: defaultdict[int, list[str]] = defaultdict(list)
    for event in of(events, "stf"):
        flows[event["id"]].append(event["ph"])
        assert any(begin <= event["ts"] <= end for begin, end in slices[event["pid"], event["tid"]])
    assert all(phases[0] == "s" and phases[-1] == "f" for phases in flows.values())
    assert all(Counter(phases)["s"] == Counter(phases)["f"] == 1 for phases in flows.values())


def of(events: list[dict[str, Any]], phases: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in phases]


def names(events: list[dict[str, Any]], what: str) -> list[str]:
    return [event["args"]["name"] for event in of(events, "M") if event["name"] == what]


def pairs(taken: Snapshot) -> list[tuple[int, int]]:
    """Begins of sends and of the receives that match them."""
    return [(s.record.posted, r.record.posted) for s, r in messages(taken, spans(taken, groups(taken)))]


def test_ranks_and_tracks_are_named() -> None:
    events = read_back(
        snapshot(
            {
                0: [record(ALL_REDUCE, 10, 20), record(SEND, 30, 40, peer=1)],
                1: [record(RECV, 30, 40, peer=0, communicator=77)],
            },
            size=3,
            hosts="aab",
        )
    )
    assert names(events, "process_name") == ["rank 0 node-a host", "rank 1 node-a host", "rank 2 node-b host"]
    assert names(events, "thread_name") == [
        "communicator 0 collectives", "communicator 0 messages out", "communicator 4d, closed messages in",
    ]  # fmt: skip
    (label,) = [event for event in events if event["name"] == "process_labels"]
    assert label["pid"] == 3 and label["args"]["labels"] == "did not answer"


def test_an_operation_tells_what_it_is() -> None:
    group = Group(9, "0.dp", (3, 1))
    rail = Share("10.0.0.1 to 10.0.0.2 (tcp)", 4000, 0)
    done = record(SEND, 2_000, 5_500, 4, peer=1, tag=6, communicator=9, way="tcp", shares=[rail], nbytes=4000)
    events = read_back(snapshot({3: [done]}, 9_000, groups={3: (group,)}))
    message, carried = of(events, "X")
    assert message == {
        "ph": "X", "name": "send", "cat": "messages out", "pid": 4, "tid": 1, "ts": 0.0, "dur": 3.5,
        "args": {
            "op": "send", "sequence": 4, "communicator": "0.dp", "bytes": 4000, "dtype": "float32", "peer": "rank 1",
            "tag": 6, "call site": "train.py:7", "state": "done", "way": "tcp",
            "shares": {"10.0.0.1 to 10.0.0.2 (tcp)": {"sent": 4000, "received": 0}},
        },
    }  # fmt: skip
    assert (carried["ts"], carried["dur"], carried["cat"]) == (0.0, 3.5, rail.connection)
    assert "rail 10.0.0.1 to 10.0.0.2 (tcp)" in names(events, "thread_name")


def test_what_is_in_progress_lasts_until_the_snapshot() -> None:
    events = read_back(
        snapshot({0: [record(ALL_REDUCE, 100, None)], 1: [record(ALL_REDUCE, 200, 250, state=State.FAILED)]})
    )
    going, failed = of(events, "X")
    assert (going["name"], going["ts"], going["dur"]) == ("all_reduce (in progress)", 0.0, 0.9)
    assert going["args"]["state"] == "in progress"
    assert (failed["name"], failed["ts"], failed["dur"]) == ("all_reduce (failed)", 0.1, 0.05)


def test_clocks_are_aligned() -> None:
    events = read_back(
        snapshot(
            {0: [record(ALL_REDUCE, 10_000, 20_000)], 1: [record(ALL_REDUCE, 1_012_000, 1_020_000)]},
            hosts="ab",
            ahead={1: 1_000_000},
            taken=30_000,
        )
    )
    assert [(event["ts"], event["dur"]) for event in of(events, "X")] == [(0.0, 10.0), (2.0, 8.0)]


def test_arrows_lead_from_sends_to_receives_and_along_collectives() -> None:
    taken = snapshot({
        0: [record(SEND, 10, 20, peer=1), record(ALL_REDUCE, 50, 90)],
        1: [record(RECV, 5, 25, peer=0), record(ALL_REDUCE, 40, 90)],
        2: [record(ALL_REDUCE, 60, 90)],
    })  # fmt: skip
    events = read_back(taken)
    arrows = [(event["name"], event["ph"], event["pid"] - 1, event["ts"] * 1000 + 5) for event in of(events, "stf")]
    assert arrows == [
        ("message", "s", 0, 10.0), ("message", "f", 1, 10.0),
        ("collective", "s", 1, 40.0), ("collective", "t", 0, 50.0), ("collective", "f", 2, 60.0),
    ]  # fmt: skip


def test_an_arrow_ends_within_the_receive() -> None:
    """Also where the other host's clock seems to be behind."""
    taken = snapshot(
        {0: [record(SEND, 10_000, 12_000, peer=1)], 1: [record(RECV, 3_000, 9_000, peer=0)]}, 20_000, hosts="ab"
    )
    _, end = of(read_back(taken), "sf")
    assert end["pid"] == 2 and end["ts"] == 5.999


def test_messages_match_by_rank_communicator_and_tag() -> None:
    group = Group(9, "0.1", (1, 0))
    taken = snapshot(
        {
            0: [
                record(SEND, 1, 2, peer=1, tag=5), record(SEND, 3, 4, peer=1, tag=6), record(SEND, 5, 6, peer=2, tag=5),
                record(SEND, 7, 8, peer=0, tag=5, communicator=9), record(RECV, 9, 30, peer=0, communicator=9),
            ],
            1: [
                record(RECV, 11, 12, peer=0, tag=6), record(RECV, 13, 14, peer=0, tag=5),
                record(RECV, 15, 16, peer=1, tag=5, communicator=9), record(SEND, 17, 18, peer=1, communicator=9),
            ],
            2: [record(RECV, 19, 20, peer=-2, tag=5)],
        },
        groups={0: (group,)},
    )  # fmt: skip
    assert pairs(taken) == [(1, 13), (3, 11), (7, 15), (17, 9)]


def test_what_was_not_received_yet_has_no_arrow() -> None:
    sends = [record(SEND, 10 * i, 10 * i + 1, peer=1) for i in range(1, 5)]
    receives = [record(RECV, 10 * i + 2, 10 * i + 5, peer=0) for i in range(1, 3)]
    assert pairs(snapshot({0: sends, 1: receives})) == [(10, 12), (20, 22)]
    assert pairs(snapshot({0: sends[:1], 1: receives})) == [(10, 12)]


def test_a_closed_communicator_of_which_no_rank_tells_has_no_arrows() -> None:
    sent, received = (record(op, 1, 2, peer=1 - rank, communicator=5) for rank, op in enumerate((SEND, RECV)))
    assert pairs(snapshot({0: [sent], 1: [received]})) == []


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 40), ahead=st.integers(0, 3), kept=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    open_ends=st.tuples(st.integers(0, 2), st.integers(0, 2)), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_the_newest_messages_match_where_recorders_have_dropped_the_oldest(
    total: int, ahead: int, kept: tuple[int, int], open_ends: tuple[int, int], seed: int
) -> None:
    """The sender is ahead by some messages at the end; each size occurs once, so there is one way to pair them."""
    sizes = random.Random(seed).sample(range(1, 1000), total + ahead + 2)
    sends = [record(SEND, 10 * i, 10 * i + 1, peer=1, nbytes=sizes[i]) for i in range(total + ahead)]
    receives = [record(RECV, 10 * i + 2, 10 * i + 4, peer=0, nbytes=sizes[i]) for i in range(total)]
    if ahead == 0:  # the newest are under way
        both = [(total + i, sizes[total + i]) for i in range(2)]
        sends += [record(SEND, 10 * i, None, peer=1, nbytes=size) for i, size in both[: open_ends[0]]]
        receives += [record(RECV, 10 * i + 2, None, peer=0, nbytes=size) for i, size in both[: open_ends[1]]]
    taken = snapshot({0: sends[-kept[0] :], 1: receives[-kept[1] :]}, 10_000, dropped=(0, 1))
    found = [(s.record.nbytes, r.record.nbytes) for s, r in messages(taken, spans(taken, groups(taken)))]
    both_kept = {r.nbytes for r in sends[-kept[0] :]} & {r.nbytes for r in receives[-kept[1] :]}
    assert found == [(size, size) for size in sizes if size in both_kept]


def test_a_receive_does_not_end_before_its_send_begins() -> None:
    """Same sizes: only the times tell that the sender is two messages ahead."""
    sends = [record(SEND, 100 + 10 * i, 101 + 10 * i, peer=1) for i in range(4)]
    receives = [record(RECV, 103 + 10 * i, 105 + 10 * i, peer=0) for i in range(2)]
    assert pairs(snapshot({0: sends, 1: receives}, dropped=(0,))) == [(100, 103), (110, 113)]


RECORDS = st.builds(
    lambda op, begin, length, sequence, peer, shares: record(
        op, begin, None if length is None else begin + length, sequence,
        peer=peer if op in (SEND, RECV) else -1, shares=shares,
    ),
    st.sampled_from([SEND, RECV, ALL_REDUCE, OpCode.BROADCAST]), st.integers(1, 1000), st.none() | st.integers(0, 300),
    st.integers(0, 5), st.integers(-2, 3).filter(lambda peer: peer != -1),
    st.lists(st.sampled_from([Share("a to b (tcp)", 5, 6), Share("a to c (tcp)", 7, 0)]), max_size=2, unique=True),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    records=st.dictionaries(st.integers(0, 3), st.lists(RECORDS, max_size=12), min_size=1),
    ahead=st.dictionaries(st.integers(0, 3), st.integers(-50, 50)),
)
def test_any_snapshot_gives_a_sound_trace(records: dict[int, list[Record]], ahead: dict[int, int]) -> None:
    unique = {
        rank: list({(r.op in (SEND, RECV) and i, r.sequence): r for i, r in enumerate(kept)}.values())
        for rank, kept in records.items()
    }
    events = read_back(snapshot(unique, 2000, size=4, ahead=ahead))
    assert len(of(events, "X")) == sum(1 + len(r.shares) for kept in unique.values() for r in kept)
