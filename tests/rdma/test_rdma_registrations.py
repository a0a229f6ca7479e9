"""Registrations that signals interrupt, that other threads or handlers change meanwhile, or that outlive what they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hosts import close, until
from registered import LONG, array


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Devices that are stalled are not given up."""
    monkeypatch.setattr("xvcomm.wire.rails.SILENT_SECONDS", 200)
    monkeypatch.setattr("xvcomm.wire.rails.STALL_SECONDS", 200)


def mapped(address):
    """Whether this process has memory there."""
    areas = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in areas)


def test_closed_after_a_ring_was(make):
    """The ring's memory is unmapped, and is not looked at."""
    hosts, producer, consumer = make()
    with hosts.register(1, array(LONG)):
        address = consumer.address
        close(producer, consumer)
        until(lambda: not mapped(address))
