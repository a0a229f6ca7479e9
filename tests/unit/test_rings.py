"""A communicator's rings: one per direction, use and channel, whose shape both ends compute."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from xvcomm.abc.peer_memory import PeerMemory
from xvcomm.abc.store import Store
from xvcomm.abc.transport import Capabilities, Transport, peer_refusal
from xvcomm.config import Config
from xvcomm.engine.session.peer_rings import PeerRings
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.engine.session.rings import CHANNELS, Member, Rings, Use
from xvcomm.memory.ring import Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.rendezvous.store.memory import MemoryStore
from xvcomm.schedule.tuning import RANKS_BYTES
from xvcomm.types.deadline import NEVER, Deadline

OFFERS = [Capabilities("own", "here", 0, shared=True)]
FIRST = PeerMemory("cuda", "here", "bus 0", ("bus 0", "bus 1"))
PEER_RINGS = PeerRings(None, lambda rank: False)
SECOND = replace(FIRST, device="bus 1", reaches=("bus 1", "bus 0"))


class Recording(Transport):
    """Records requests; its rings have the minimum size."""

    def __init__(self) -> None:
        self.opened: dict[str, tuple[int, RingLayout, bool]] = {}

    def capabilities(self) -> Capabilities:
        return OFFERS[0]

    def open_ring(
        self, name: str, peer: int, member: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool,
        job: str, group: int,
    ) -> RingEnd:  # fmt: skip
        assert name not in self.opened, "a ring is opened once"
        self.opened[name] = (peer, layout, producer)
        least = RingLayout(1, 2, 4096)
        segment = Segment.create("/dev/shm", job, least.size)
        segment.unlink()
        return RingEnd.create(segment, least, peer=peer, producer=producer)

    def close(self) -> None:
        pass


def links(transport: Transport, rank: int, kinds: tuple[str, ...] = ("host", "host", "cuda"), **config: int) -> Rings:
    members = [Member(number, OFFERS, kind, kind) for number, kind in enumerate(kinds)]
    return Rings(Config(**config), "links", 1, MemoryStore(), rank, [transport], PEER_RINGS, members)


def test_each_channel_has_a_ring_of_its_own() -> None:
    transport = Recording()
    mine = links(transport, 0)
    keys = [
        *((Use.POINT_TO_POINT, peer, producer, channel)
          for peer, producer, channel in itertools.product((1, 2), (True, False), (0, 1, CHANNELS - 1))),
        *((Use.COLLECTIVE, peer, producer, 0) for peer, producer in itertools.product((1, 2), (True, False))),
    ]  # fmt: skip
    ends = [mine.end(peer, use, NEVER, producer=producer, channel=channel) for use, peer, producer, channel in keys]
    assert len({id(end) for end in ends}) == len(transport.opened) == len(keys)
    for (use, peer, producer, channel), end in zip(keys, ends, strict=True):
        assert (end.peer, end.producer, end.channel) == (peer, producer, channel)
        assert mine.end(peer, use, NEVER, producer=producer, channel=channel) is end
    mine.lose(1, Reason.LEFT.word(1))
    assert all(bool(end.abort_word()) == (end.peer == 1) for end in ends)
    mine.abort(Reason.ABORTED.word(0))
    assert all(end.abort_word() for end in ends)
    assert mine.end(2, Use.POINT_TO_POINT, NEVER, producer=True, channel=7).abort_word()
    mine.close()


@pytest.mark.parametrize(
    "config", [{}, {"ring_slots": 2, "gpu_ring_slots": 2, "gpu_ring_lanes": 1, "gpu_ring_slot_bytes": 4096}]
)
@pytest.mark.parametrize("channel", [0, 1, CHANNELS - 1])
def test_both_ends_know_the_shape(config: dict[str, int], channel: int) -> None:
    for a, b in ((0, 1), (0, 2), (2, 1)):
        there, here = Recording(), Recording()
        for rank, peer, transport in ((a, b, here), (b, a, there)):
            ends = links(transport, rank, **config)
            for producer in (True, False):
                ends.end(peer, Use.POINT_TO_POINT, NEVER, producer=producer, channel=channel)
            ends.close()
        assert {n: layout for n, (_, layout, _) in here.opened.items()} == {
            n: layout for n, (_, layout, _) in there.opened.items()
        }
        assert all(here.opened[name][2] != there.opened[name][2] for name in here.opened)


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("channel", [0, 1])
def test_both_ends_know_the_shape_whatever_the_settings_of_each(use: Use, channel: int) -> None:
    """Also between hosts, where neither finds the other's half in memory: the lower rank's settings count."""
    far = [Capabilities("own", "far", 0)]
    settings = [Config(wire_slots=8, ring_slots=4, gpu_ring_lanes=3), Config(wire_slots=32, ring_slots=20)]
    for kinds, offers in itertools.product((("host", "host"), ("host", "cuda"), ("cuda", "cuda")), (OFFERS, far)):
        members = [
            Member(rank, offers, kind, "a", sizes=RingSizes.of(config))
            for rank, (kind, config) in enumerate(zip(kinds, settings, strict=True))
        ]
        found = []
        for rank, config in enumerate(settings):
            transport = Recording()
            ends = Rings(config, "links", 1, MemoryStore(), rank, [transport], PEER_RINGS, members)
            ends.end(1 - rank, use, NEVER, producer=rank == 0, channel=channel)
            ends.close()
            found.append({name: layout for name, (_, layout, _) in transport.opened.items()})
        assert found[0] == found[1]
    wire = RingLayout(1, 8, Config().wire_slot_bytes)
    assert shape(Member(0, far, "host", "a", sizes=RingSizes.of(settings[0])), Member(1, far, "host", "a"), 1) == wire


def test_further_channels_have_less_memory() -> None:
    transport = Recording()
    mine = links(transport, 0)
    for peer, channel in itertools.product((1, 2), (0, 1)):
        mine.end(peer, Use.POINT_TO_POINT, NEVER, producer=True, channel=channel)
    mine.close()
    data = {name: layout.size - layout.data for name, (_, layout, _) in transport.opened.items()}
    assert [data[f"ring/point_to_point/0-{peer}/{channel}"] for peer in (1, 2) for channel in (0, 1)] == [
        96 * 16384, 32 * 16384, 8 << 20, 2 << 20
    ]  # fmt: skip


def shape(ours: Member, theirs: Member, rank: int, channel: int = 0) -> RingLayout:
    """The requested shape of a ring between two ranks."""
    transport = Recording()
    mine = Rings(Config(), "links", 1, MemoryStore(), rank, [transport], PEER_RINGS, [ours, theirs])
    mine.end(1 - rank, Use.POINT_TO_POINT, NEVER, producer=True, channel=channel)
    mine.close()
    return next(iter(transport.opened.values()))[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_slots_lie_in_gpu_memory_inside_an_island(rank: int) -> None:
    ours, theirs = Member(4, OFFERS, "cuda", "a", FIRST), Member(7, OFFERS, "cuda", "a", SECOND)
    assert shape(ours, theirs, rank) == RingLayout(16, 4, 256 << 10, apart=True)
    assert shape(ours, theirs, rank, 3) == RingLayout(8, 4, 128 << 10, apart=True)
    assert shape(ours, theirs, rank).size < shape(ours, theirs, rank).capacity


@pytest.mark.parametrize("rank", [0, 1])
def test_slots_lie_in_host_memory_elsewhere(rank: int) -> None:
    """Across islands of a rehearsal too, whose GPUs do reach each other."""
    ours = Member(4, OFFERS, "cuda", "a", FIRST)
    for theirs in (
        Member(7, OFFERS, "cuda", "b", SECOND),
        Member(7, OFFERS, "cuda", "a", replace(SECOND, refused="switched off")),
        Member(7, OFFERS, "cuda", "a"),
        Member(7, OFFERS, "host", "a"),
    ):
        assert shape(ours, theirs, rank) == RingLayout(8, 4, 256 << 10)


@pytest.mark.parametrize(
    ("theirs", "refusal"),
    [
        (SECOND, ""),
        (FIRST, ""),
        (None, "not both ranks have GPUs"),
        (replace(SECOND, refused="switched off"), "switched off"),
        (replace(SECOND, runtime="rocm"), "different vendors"),
        (replace(SECOND, processes="container"), "--ipc=host"),
        (replace(SECOND, reaches=("bus 1",)), "bus 0 and bus 1 do not reach"),
        (replace(SECOND, device="bus 2"), "bus 0 and bus 2 do not reach"),
    ],
)
def test_reasons_against_peer_memory(theirs: PeerMemory | None, refusal: str) -> None:
    """Both ends come to the same."""
    found = peer_refusal(FIRST, theirs)
    assert found == peer_refusal(theirs, FIRST)
    assert refusal in found and bool(refusal) == bool(found)


@pytest.mark.parametrize(("kinds", "fixed"), [(("host", "host"), False), (("host", "host", "cuda"), True)])
def test_rings_for_collectives_keep_their_size_in_a_job_with_gpus(kinds: tuple[str, ...], fixed: bool) -> None:
    transport = Recording()
    mine = links(transport, 0, kinds)
    for use in Use:
        mine.end(1, use, NEVER, producer=True)
    mine.close()
    found = {name.split("/")[1]: layout.fixed for name, (_, layout, _) in transport.opened.items()}
    assert found == {"point_to_point": False, "collective": fixed, "short": fixed}


@pytest.mark.parametrize("config", [{}, {"ring_slots": 2, "gpu_ring_lanes": 1, "peer_ring_slot_bytes": 4096}])
def test_very_short_arrays_cross_in_little_memory_whatever_the_settings(config: dict[str, int]) -> None:
    """All ranks have such rings with all others, and plans rely on the size that each can buffer."""
    members = [
        Member(0, OFFERS, "cuda", "a", FIRST), Member(1, OFFERS, "cuda", "a", SECOND), Member(2, OFFERS, "cuda", "b", FIRST),
        Member(3, OFFERS, "host", "c"), Member(4, OFFERS, "host", "c"),
    ]  # fmt: skip
    for rank, (ours, theirs) in itertools.product((0, 1), itertools.permutations(members, 2)):
        transport = Recording()
        mine = Rings(Config(**config), "links", 1, MemoryStore(), rank, [transport], PEER_RINGS, [ours, theirs])
        mine.end(1 - rank, Use.SHORT, NEVER, producer=True)
        mine.close()
        _, layout, _ = transport.opened[f"ring/short/{rank}-{1 - rank}/0"]
        assert layout.at_once(2) >= RANKS_BYTES and layout.capacity <= 256 << 10
        assert layout.apart == (ours.island == theirs.island == "a")
