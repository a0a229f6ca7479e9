"""The cost model follows the steps: bytes, latencies, overlapping lanes."""

from __future__ import annotations

import itertools

import pytest

from xvcomm.schedule import build
from xvcomm.schedule.cost import Links, estimate, predict, representatives
from xvcomm.schedule.describe import lines
from xvcomm.schedule.steps import Buf, Collective, Copy, Get, Lane, Put, Request, Schedule, Span
from xvcomm.types.topology import Topology

LINKS = Links()
GIB = 1 << 30


def test_one_message_takes_latency_and_bytes_over_bandwidth() -> None:
    span = Span(Buf.IN, 0, 1000)
    prediction = predict({3: Schedule((Put(Lane.SEND, (), 1, span),), 0)}, 4, LINKS)
    assert prediction.seconds == pytest.approx(LINKS.border_latency + 4000 / LINKS.border_bandwidth)
    assert prediction.rank == 3
    assert prediction.busy[Lane.SEND] == prediction.seconds
    assert prediction.busy[Lane.NATIVE] == 0


def test_lanes_overlap_unless_after_says_otherwise() -> None:
    span = Span(Buf.OUT, 0, 1000)
    put, get = Put(Lane.SEND, (), 1, Span(Buf.IN, 0, 1000)), Get(Lane.RECV, (), 1, span)
    alone = predict({0: Schedule((put,), 0)}, 4, LINKS).seconds
    both = predict({0: Schedule((put, get), 0)}, 4, LINKS).seconds
    chain = predict(
        {0: Schedule((put, Get(Lane.RECV, (0,), 1, span), Copy(Lane.NATIVE, (1,), span, span)), 0)}, 4, LINKS
    )
    assert both == alone
    assert chain.seconds > 2 * alone


def test_the_border_bounds_a_large_all_reduce() -> None:
    topology = Topology.from_labels("aabb")
    request = Request(Collective.ALL_REDUCE, 4, count=GIB // 4)
    border = GIB / 2 / LINKS.border_bandwidth
    whole = estimate(request, topology, 0, LINKS).seconds
    cut = estimate(request, topology, GIB // 64, LINKS).seconds
    assert border < cut < whole
    assert cut < 1.15 * border


def test_representatives_find_the_slowest_island() -> None:
    topology = Topology.from_labels("a" + "b" * 7)
    assert representatives(topology) == (0, 1, 7)
    request = Request(Collective.ALL_REDUCE, 4, count=1 << 20)
    every = {rank: build(request, topology, rank) for rank in range(8)}
    assert estimate(request, topology, 0, LINKS).seconds == predict(every, 4, LINKS).seconds
    assert estimate(request, topology, 0, LINKS).rank == 0


def test_ten_thousand_ranks() -> None:
    topology = Topology.from_labels(["a", "b", "c", "b"] * 2500)
    request = Request(Collective.ALL_REDUCE, 2, count=10**9)
    prediction = estimate(request, topology, 0, LINKS)
    assert 0 < prediction.seconds < 1


def test_no_steps_take_no_time() -> None:
    assert predict({0: Schedule((), 0)}, 4, LINKS).seconds == 0


def test_every_step_reads_as_text() -> None:
    text = []
    for op, average, islands in itertools.product(Collective, (False, True), ("aabbc", "aabbb")):
        topology = Topology.from_labels(islands)
        request = Request(op, 4, count=64, counts=(8, 0, 5, 7, 1), recv_counts=(8,) * 5, root=1, average=average)
        for rank in range(5):
            schedule = build(request, topology, rank)
            text += lines(schedule)
            assert len(lines(schedule)) == len(schedule.steps)
    joined = "\n".join(text)
    for word in (
        "put in[",
        "get rank 2 ->",
        "reduce out[",
        "average out[",
        "scale out[",
        "by average",
        "copy in[",
        "counts (",
        "after ",
    ):
        assert word in joined


def test_ranks_of_a_host_share_its_rails() -> None:
    """Between hosts: the wire's latency, and the host's bandwidth divided by its ranks; never more than a link's."""
    hosts = ("x", "x", "y", "y", "z")
    links = Links(border_latency=1e-6, border_bandwidth=50e9, wire_latency=3e-6, wire_bandwidth=60e9)

    def seconds(rank: int, peer: int) -> float:
        put = Put(Lane.SEND, (), peer, Span(Buf.IN, 0, 1_500_000))
        return predict({rank: Schedule((put,), 0)}, 4, links, hosts).seconds

    assert seconds(0, 1) == pytest.approx(1e-6 + 6e6 / 50e9)
    assert seconds(0, 2) == pytest.approx(3e-6 + 6e6 / 30e9)
    assert seconds(4, 2) == pytest.approx(3e-6 + 6e6 / 30e9)
    alone = Links(border_latency=1e-6, border_bandwidth=50e9, wire_latency=3e-6, wire_bandwidth=100e9)
    put = Put(Lane.SEND, (), 1, Span(Buf.IN, 0, 1_500_000))
    assert predict({0: Schedule((put,), 0)}, 4, alone, ("x", "y")).seconds == pytest.approx(3e-6 + 6e6 / 50e9)
