"""Plans are cached, cut into segments when large, and take little work for ten thousand ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from xvcomm.config import Config
from xvcomm.engine.planner import Planner
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.engine.session.rings import at_once
from xvcomm.errors import ArgumentError
from xvcomm.schedule.steps import Collective, Exchange, GetReduce, Native, Request
from xvcomm.schedule.tuning import ARRAYS_BYTES, PAIR_BYTES, PARTS_BYTES, RANKS_BYTES, WIRE_PARTS_BYTES, tune
from xvcomm.types.topology import Topology

CONFIG = Config(segment_bytes=1 << 20, ring_slots=2, ring_slot_bytes=4096)
AT_ONCE = at_once(RingSizes.of(CONFIG), gpus=True)
TOPOLOGY = Topology.from_labels("aabb")


def test_equal_requests_get_the_same_plan() -> None:
    planner = Planner(TOPOLOGY, 1, CONFIG)
    plan = planner.plan(Request(Collective.ALL_REDUCE, 4, count=100))
    assert planner.plan(Request(Collective.ALL_REDUCE, 4, count=100)) is plan
    assert planner.plan(Request(Collective.ALL_REDUCE, 4, count=101)) is not plan


def test_large_arrays_are_cut_into_segments() -> None:
    planner = Planner(TOPOLOGY, 0, CONFIG)
    small = planner.plan(Request(Collective.ALL_REDUCE, 4, count=1 << 18))
    large = planner.plan(Request(Collective.ALL_REDUCE, 4, count=1 << 22))
    assert small.segment == 0
    assert large.segment * 4 == 2 << 20  # two links carry a segment
    natives = [step for step in large.schedule.steps if isinstance(step, Native)]
    sizes = [step.src.count for step in natives if step.op is Collective.REDUCE_SCATTER]
    first, *between, last = sizes
    assert sum(sizes) == 1 << 22
    unit = large.segment // 64
    for end in (first, last):  # the border waits for the first and the islands for the last
        assert abs(end - large.segment // 5) <= unit
    assert max(between) - min(between) <= unit
    assert all(abs(size - large.segment) < large.segment // 2 for size in between)


def test_segments_need_a_border_and_an_operation_that_can_be_cut() -> None:
    huge = 1 << 40
    assert tune(Collective.ALL_REDUCE, huge, Topology.from_labels("aaaa"), 4096, AT_ONCE).segment_bytes == 0
    assert tune(Collective.ALL_GATHER, huge, TOPOLOGY, 4096, AT_ONCE).segment_bytes == 0
    assert tune(Collective.BROADCAST, huge, TOPOLOGY, 4096, AT_ONCE).segment_bytes == 8192


def test_explain_names_every_step() -> None:
    plan = Planner(TOPOLOGY, 2, CONFIG).plan(Request(Collective.ALL_REDUCE, 4, count=4096))
    head, *steps = plan.explain()
    assert head == "all_reduce of 4096 elements of 4 bytes on rank 2: 4 steps, one segment, scratch 2048"
    assert steps == [
        "   0  native  reduce_scatter in[0:4096] -> tmp[0:2048] counts 2 x 2048",
        "   1  send    put tmp[0:2048] -> rank 0  after 0",
        "   2  recv    get_reduce rank 0 and tmp[0:2048] -> out[0:2048] remote first  after 0",
        "   3  native  all_gather out[0:2048] -> out[0:4096] counts 2 x 2048  after 2",
    ]


def test_few_gpus_send_very_short_arrays_to_all_others() -> None:
    """Neither many ranks, nor ranks of several hosts, nor islands of one rank, which have no native call to save."""
    request = Request(Collective.ALL_REDUCE, 4, count=3)
    _, *steps = Planner(TOPOLOGY, 2, CONFIG, gpus=True).plan(request).explain()
    assert steps == [
        "   0  send    put in[0:3] -> rank 3",
        "   1  send    put in[0:3] -> rank 0",
        "   2  send    put in[0:3] -> rank 1",
        "   3  recv    get rank 1 -> tmp[0:3]",
        "   4  recv    get rank 0 -> tmp[4:7]",
        "   5  recv    get rank 3 -> tmp[8:11]",
        "   6  recv    reduce tmp[4:7], tmp[0:3], in[0:3], tmp[8:11] -> out[0:3]  after 2",
    ]
    least = Config(ring_slots=2, gpu_ring_lanes=1, gpu_ring_slot_bytes=4096, peer_ring_lanes=1, peer_ring_slots=2)
    longest = Request(Collective.ALL_REDUCE, 4, count=RANKS_BYTES // 4)
    for config in (CONFIG, least):  # which are not those of the rings for this
        assert Planner(TOPOLOGY, 2, config, gpus=True).plan(longest).exchange is Exchange.RANKS
    others = Topology.from_labels("aaaaabbbb"), Topology.from_labels("aabb", "xxyy"), Topology.from_labels("abc")
    for topology in others:
        plan = Planner(topology, 0, CONFIG, gpus=True).plan(request)
        assert plan.exchange is Exchange.ARRAYS


def test_short_arrays_of_gpus_cross_undivided_if_rings_take_them_at_once() -> None:
    n, tight, roomy = RANKS_BYTES // 4 + 1, Config(ring_slots=6), Config(ring_lanes=8)
    planner = Planner(TOPOLOGY, 2, roomy, gpus=True)
    _, *steps = planner.plan(Request(Collective.ALL_REDUCE, 4, count=n)).explain()
    assert steps == [
        f"   0  native  all_reduce in[0:{n}] -> tmp[0:{n}]",
        f"   1  send    put tmp[0:{n}] -> rank 0  after 0",
        f"   2  recv    get_reduce rank 0 and tmp[0:{n}] -> out[0:{n}] remote first  after 0",
    ]
    assert len(Planner(TOPOLOGY, 2, CONFIG).plan(Request(Collective.ALL_REDUCE, 4, count=n)).schedule.steps) == 4
    for config, most in ((tight, 96 << 10), (roomy, ARRAYS_BYTES)):
        assert min(at_once(RingSizes.of(config), gpus=True), ARRAYS_BYTES) == most
        request = Request(Collective.ALL_REDUCE, 4, count=most // 4 + 1)
        assert len(Planner(TOPOLOGY, 2, config, gpus=True).plan(request).schedule.steps) == 4


@pytest.mark.parametrize(
    ("islands", "hosts", "least"),
    [("ab", "xx", PARTS_BYTES), ("aab", "xxy", WIRE_PARTS_BYTES), ("ab", "xy", PAIR_BYTES)],
)
def test_large_arrays_in_host_memory_are_added_by_halves(islands: str, hosts: str, least: int) -> None:
    """Between two islands: each adds half of the elements, then they exchange the results. GPUs add everything at once."""
    topology = Topology.from_labels(islands, hosts)
    added = []
    for nbytes, gpus in ((least - 4, False), (least, False), (least, True)):
        last = topology.size - 1
        plan = Planner(topology, last, CONFIG, gpus=gpus).plan(Request(Collective.ALL_REDUCE, 4, count=nbytes // 4))
        reduced = sum(step.dst.count for step in plan.schedule.steps if isinstance(step, GetReduce))
        added.append(reduced * 4 / nbytes)
    part = 0.5 if topology.size == 2 else 1 / 3
    assert added == [1, pytest.approx(part, abs=1e-4), 1]


def test_arrays_of_two_hosts_are_sent_from_where_they_are() -> None:
    """The schedule is messages alone, which compiled code can repeat; short arrays cross whole if rings take them at once."""
    topology, words = Topology.from_labels("ab", "xy"), PAIR_BYTES // 4 - 1
    _, *steps = Planner(topology, 0, Config()).plan(Request(Collective.ALL_REDUCE, 4, count=words)).explain()
    assert steps == [
        f"   0  send    put in[0:{words}] -> rank 1",
        f"   1  recv    get_reduce rank 1 and in[0:{words}] -> out[0:{words}]  after 0",
    ]
    words = PAIR_BYTES // 4
    _, *steps = Planner(topology, 0, Config()).plan(Request(Collective.ALL_REDUCE, 4, count=words)).explain()
    assert steps == [
        f"   0  send    put in[{words // 2}:{words}] -> rank 1",
        f"   1  recv    get_reduce rank 1 and in[0:{words // 2}] -> out[0:{words // 2}]",
        f"   2  send    put out[0:{words // 2}] -> rank 1  after 1",
        f"   3  recv    get rank 1 -> out[{words // 2}:{words}]  after 0",
    ]


def test_ranks_whose_rings_differ_agree_on_a_plan() -> None:
    """A message that fills a ring waits for its receiver, so that the smallest ring counts."""
    topology, request = (
        Topology.from_labels("ab", "xy"),
        Request(Collective.ALL_REDUCE, 4, count=PAIR_BYTES // 8),
    )
    small = Config(wire_slots=4, wire_slot_bytes=PAIR_BYTES // 8)
    rings = [RingSizes.of(config) for config in (Config(), small)]
    found = [Planner(topology, r, c, rings=rings).plan(request).exchange for r, c in enumerate((Config(), small))]
    assert found == [Exchange.SUMS] * 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Collective.BROADCAST, 4, count=1, root=4), r"root 4 is not in 0\.\.3"),
        (Request(Collective.ALL_GATHER, 4, counts=(1, 2)), "counts must have 4 entries"),
        (Request(Collective.ALL_TO_ALL, 4, counts=(1,) * 4), "counts must have 4 entries"),
    ],
)
def test_requests_that_do_not_fit_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Planner(TOPOLOGY, 0, CONFIG).plan(request_)
    with pytest.raises(ArgumentError, match="rank 4"):
        Planner(TOPOLOGY, 4, CONFIG).plan(Request(Collective.ALL_REDUCE, 4, count=1))


@pytest.mark.parametrize(
    "labels",
    [["a"] * 5000 + ["b"] * 5000, ["a", "b", "c", "b", "a"] * 2000, ["a"] + ["b"] * 9999],
    ids=("halves", "three interleaved", "one against all"),
)
@pytest.mark.parametrize("op", Collective)
def test_plans_for_ten_thousand_ranks_take_little_work(op: Collective, labels: list[str]) -> None:
    """At most a thousand lines of code for each rank: a loop over all pairs of ranks would take ten times as many."""
    size = len(labels)
    topology = Topology.from_labels(labels)
    request = Request(op, 4, count=10**9, counts=(1000,) * size, recv_counts=(1000,) * size, root=size // 2)
    for rank in (0, size // 2):
        planner = Planner(topology, rank, Config())
        assert lines_of(lambda planner=planner: planner.plan(request)) < 1000 * size
        assert planner.plan(request).schedule.steps


def lines_of(call: Callable[[], Any]) -> int:
    """How many lines of Python a call runs, with those that loops repeat."""
    lines, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
