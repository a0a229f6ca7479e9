"""Islands: their members, their order, and their text format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm.errors import ArgumentError
from xvcomm.types.topology import Island, Topology, parse_islands

labels = st.lists(st.sampled_from("abcde"), min_size=1, max_size=30)


@given(labels)
def test_every_rank_lies_in_the_island_of_its_label(names: list[str]) -> None:
    topology = Topology.from_labels(names)
    assert topology.size == len(names)
    assert topology.homogeneous == (len(set(names)) == 1)
    assert [island.index for island in topology.islands] == list(range(len(set(names))))
    assert [island.ranks[0] for island in topology.islands] == sorted(names.index(name) for name in set(names))
    for rank, name in enumerate(names):
        island = topology.island_of(rank)
        assert island.label == name
        assert island.ranks[topology.local(rank)] == rank
        assert list(island.ranks) == sorted(island.ranks)
    assert sum(island.size for island in topology.islands) == len(names)


@given(labels)
def test_equal_topologies_are_one_key(names: list[str]) -> None:
    one, other = Topology.from_labels(names), Topology.from_labels(list(names))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Topology.from_labels([*names, "a"])
    assert one != Topology.from_labels(names, hosts=[f"host {i}" for i in range(1, len(names) + 1)])


@pytest.mark.parametrize(
    "islands",
    [
        (Island(0, "a", (0, 1)), Island(1, "b", (1, 2))),
        (Island(0, "a", (0,)), Island(1, "b", (2,))),
        (Island(0, "a", (0, 1, 2, 3)),),
        (),
    ],
)
def test_islands_hold_every_rank_once(islands: tuple[Island, ...]) -> None:
    with pytest.raises(ArgumentError, match="exactly once"):
        Topology(islands, ("host",) * 3)


def test_ranks_of_two_hosts() -> None:
    topology = Topology.from_labels(("x", "y", "x", "y"), ("id0", "id0", "id1", "id1"))
    assert [island.ranks for island in topology.islands] == [(0, 2), (1, 3)]
    assert topology.hosts == ("id0", "id0", "id1", "id1")
    assert topology.spread
    assert not Topology.from_labels(("x", "y", "x", "y"), ("id0", "id1", "id0", "id1")).spread


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("cuda:2,rocm:2", "cuda cuda rocm rocm"),
        ("a,b,a", "a b a"),
        (" a:1 , b:3", "a b b b"),
        ("host:1", "host"),
    ],
)
def test_written_islands(text: str, want: str) -> None:
    assert parse_islands(text) == tuple(want.split())


@pytest.mark.parametrize("text", ["", ",", "a:", "a:0", "a:-1", "a:x", ":2", "a:2,,b", "a:1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="expected label:count"):
        parse_islands(text)
