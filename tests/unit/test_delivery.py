"""Which of two rails takes a slot, by a clock and a kernel of the test's own; the code runs as plain Python."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from xvcomm.wire import delivery

NOW = 10**12
SLOT, MESSAGE = 512 << 10, 1 << 20
FAST, SLOW = 0.125, 0.005  # bytes a nanosecond
PERIOD_NS = 8_800_000
"""How long the faster rail takes for a message."""


ROUTES = itertools.count(1)


def rail(rate: float, measured: int) -> SimpleNamespace:
    """One between addresses of its own that is idle, and has told all it ever sent."""
    told = SimpleNamespace(
        round_trip=200, least_round_trip=5, limits=1, rate=0, unsent=0, sent=measured, repeated=0, acknowledged=measured
    )
    number = next(ROUTES)
    return SimpleNamespace(
        path=number, route=number, told=told, looked=0, sent=0, sent_then=0, queued=0, rate=rate, growth=0.0, grown=NOW,
        tried=0, tried_after=0, tried_since=0, watched=0, measured=measured, full_since=0, acknowledged=0, blocked=0,
        copying=0,
    )  # fmt: skip


@pytest.fixture
def seconds_until_tried(monkeypatch: pytest.MonkeyPatch):
    """After how long the second of two rails first takes a slot, where messages of two slots follow each other."""

    def run(*rails: SimpleNamespace) -> float:
        now = [NOW]
        monkeypatch.setattr(delivery, "monotonic", lambda: now[0])
        monkeypatch.setattr(delivery, "ask_kernel", lambda _: True)
        monkeypatch.setattr(delivery, "rail_at", rails.__getitem__)
        link, began = SimpleNamespace(socket_count=2, sockets=[0, 1]), now[0]
        while now[0] - began < 60e9:
            for rest in (MESSAGE, SLOT):
                if not delivery.another_is_sooner(link, rails[1], SLOT, rest, MESSAGE):
                    return (now[0] - began) / 1e9
            now[0] += PERIOD_NS
        return 60.0

    return run


def test_a_rail_of_the_same_speed_shares(seconds_until_tried) -> None:
    assert seconds_until_tried(rail(FAST, 1 << 30), rail(FAST, 1 << 30)) == 0


def test_rails_between_the_same_addresses_share(seconds_until_tried) -> None:
    """Whatever their rates seem to be: threads of one machine are slowed down by each other."""
    rails = rail(FAST, 1 << 30), rail(SLOW, 1 << 30)
    rails[1].route = rails[0].route
    assert seconds_until_tried(*rails) == 0


def test_a_slow_rail_is_tried_from_time_to_time(seconds_until_tried) -> None:
    """Each trial costs a message ten times its time."""
    assert 1 < seconds_until_tried(rail(FAST, 1 << 30), rail(SLOW, 1 << 30)) < 10


def test_a_rail_that_was_measured_by_little_is_tried_soon(seconds_until_tried) -> None:
    """Its first bytes went slowly, as those of a new connection may; it once stayed unused for good."""
    assert seconds_until_tried(rail(FAST, 1 << 30), rail(SLOW, 256 << 10)) < 0.5


def test_a_pause_does_not_make_a_slow_rail_fast(seconds_until_tried) -> None:
    """Of a minute between two messages."""
    slow = rail(SLOW, 1 << 30)
    slow.grown = NOW - 60 * 10**9
    assert seconds_until_tried(rail(FAST, 1 << 30), slow) > 1


def test_a_far_rail_does_not_seem_to_grow(seconds_until_tried) -> None:
    """Its round trip is why it leaves slots to others, at which no rate helps; it grew until its queue seemed to be nothing."""
    far = rail(FAST, 1 << 30)
    far.told.least_round_trip = far.told.round_trip = 50_000
    assert seconds_until_tried(rail(FAST, 1 << 30), far) == 60
    assert far.growth == 0


def test_the_time_in_which_nobody_asked_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was alone for a minute, and was idle most of that time, is as fast as before."""
    alone = rail(FAST, 1 << 30)
    monkeypatch.setattr(delivery, "monotonic", lambda: NOW)
    monkeypatch.setattr(delivery, "ask_kernel", lambda _: True)
    alone.looked = alone.full_since = NOW - 60 * 10**9
    alone.told.unsent, alone.told.acknowledged = 1 << 20, (1 << 30) + (1 << 20)
    alone.acknowledged = 1 << 30
    delivery.look(alone)
    assert alone.rate == FAST


def test_four_links_share_the_slots_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes one of four, and not the first two of them two."""
    rails = [rail(FAST, 1 << 30) for _ in range(4)]
    monkeypatch.setattr(delivery, "monotonic", lambda: NOW)
    monkeypatch.setattr(delivery, "ask_kernel", lambda _: True)
    monkeypatch.setattr(delivery, "rail_at", rails.__getitem__)
    link, left = SimpleNamespace(socket_count=4, sockets=[0, 1, 2, 3]), 4
    for each in rails:
        while left and not delivery.another_is_sooner(link, each, SLOT, left * SLOT, 4 * SLOT):
            each.sent += SLOT
            left -= 1
    assert [each.sent // SLOT for each in rails] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("round_trip", "queued", "left"),
    [(200, 0, False), (50_000, 0, True), (200, 1 << 20, True)],
    ids=["equal", "far", "full"],
)
def test_credits_go_by_the_rail_that_delivers_them_soonest(
    monkeypatch: pytest.MonkeyPatch, round_trip: int, queued: int, left: bool
) -> None:
    rails = [rail(FAST, 1 << 30), rail(FAST, 1 << 30)]
    rails[1].told.round_trip, rails[1].told.unsent = round_trip, queued
    monkeypatch.setattr(delivery, "monotonic", lambda: NOW)
    monkeypatch.setattr(delivery, "ask_kernel", lambda _: True)
    monkeypatch.setattr(delivery, "rail_at", rails.__getitem__)
    link = SimpleNamespace(socket_count=2, sockets=[0, 1])
    assert not delivery.credit_is_sooner(link, rails[0])
    assert delivery.credit_is_sooner(link, rails[1]) is left


def test_a_pause_after_a_short_message_does_not_make_its_rail_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may come a second later; a tenth of the speed was measured once, by the time of a reply."""
    nbytes, now, only = 64 << 10, [NOW], rail(FAST, 1 << 30)
    slow = rail(SLOW, 1 << 30)
    monkeypatch.setattr(delivery, "monotonic", lambda: now[0])
    monkeypatch.setattr(delivery, "ask_kernel", lambda _: True)
    monkeypatch.setattr(delivery, "rail_at", [only, slow].__getitem__)
    link = SimpleNamespace(socket_count=2, sockets=[0, 1])
    only.told.limits = 0
    for _ in range(10):
        assert not delivery.another_is_sooner(link, only, nbytes, nbytes, nbytes)
        only.sent += nbytes
        only.told.sent += nbytes
        end = now[0] + nbytes / FAST
        while now[0] < end + 10**7:
            now[0] += 20_000
            if now[0] >= end:
                only.told.acknowledged = only.told.sent
            delivery.watch(only)
        now[0] += 10**9
    assert only.rate > 0.8 * FAST
