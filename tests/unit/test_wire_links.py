"""When a connection counts as stalled."""

import socket
from types import SimpleNamespace

import pytest

from xvcomm.wire import links, rails


@pytest.fixture
def looks(monkeypatch):
    """A link with two connections: a function that looks at them at a time, and gives those that it drops.

    Its arguments are the time, and for each connection the bytes sent so far, and those that the other host has not acknowledged.
    """
    now, dropped, unseen = [0.0], [], {}
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(rails, "queued", unseen.get)
    monkeypatch.setattr(rails.heartbeat, "answers", lambda connection: False)
    records = [SimpleNamespace(sent=0, received=0, ping=0) for _ in range(2)]
    carrier = SimpleNamespace(add_link=lambda: 0, rails=records, drop=dropped.append)
    link = links.Link(links.Process(0, b"", carrier, None, 10.0, lambda rank: (), lambda rank, why: None), 1)
    with socket.socket() as first, socket.socket() as second:
        link.rails = {index: rails.Rail(end, ("", "", index), None) for index, end in enumerate((first, second))}

        def look(at, *states):
            now[0] = at
            dropped.clear()
            for rail, record, (sent, queued) in zip(link.rails.values(), records, states, strict=True):
                record.sent, unseen[rail.connection] = sent, queued
            link.look()
            return list(dropped)

        look.link = link
        yield look


def test_a_late_look(looks):
    """Bytes that are under way at the moment of a look say nothing, however late the look is."""
    assert looks(0.0, (100, 0), (100, 0)) == []
    assert looks(5.0, (164, 64), (164, 0)) == []
    assert looks(10.0, (228, 64), (228, 0)) == []


def test_a_stalled_connection(looks):
    """A connection on which nothing more is acknowledged is dropped, as long as the other one works."""
    assert looks(0.0, (100, 0), (100, 0)) == []
    assert looks(0.2, (164, 64), (164, 0)) == []
    assert looks(0.4, (228, 128), (228, 0)) == []
    assert looks(0.6, (292, 192), (292, 0)) == [0]


def test_all_stalled(looks):
    """If none works, they are dropped after half of XVCOMM_PEER_TIMEOUT, so that others can be tried."""
    assert looks(0.0, (164, 64), (164, 64)) == []
    for at in range(1, 7):
        assert looks(float(at), (164, 64), (164, 64)) == []
    assert looks(6.1, (164, 64), (164, 64)) == [0, 1]


def test_a_host_that_answers(looks, monkeypatch):
    """A host answers as long as it acknowledges on any connection, if only that its process takes nothing more."""
    assert looks.link.answers()
    looks(0.0, (164, 64), (164, 64))
    looks(0.2, (164, 64), (164, 64))
    assert looks.link.answers()
    looks(0.6, (164, 64), (170, 6))
    assert looks.link.answers()
    for at in (1.2, 1.6):
        looks(at, (164, 64), (170, 6))
    assert not looks.link.answers()
    monkeypatch.setattr(rails.heartbeat, "answers", lambda connection: True)
    assert looks.link.answers()


def test_a_long_way(looks, monkeypatch):
    """Where acknowledgements take long, a rail is given the time to send again what was lost, and no more."""
    monkeypatch.setattr(rails.heartbeat, "round_trip", lambda connection: 0.4)
    looks(0.0, (100, 0), (100, 0))
    for at in (0.2, 0.4, 0.8, 1.2, 1.6, 2.0):
        assert looks(at, (164, 64), (int(100 * at) + 100, 10)) == []
    assert looks(2.2, (164, 64), (320, 10)) == [0]
