"""A job of two ranks on two hosts with Soft-RoCE: what it sends goes over RDMA, also while a link is cut."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rdma

SECONDS = 60.0
COUNT = 1 << 20


@pytest.fixture
def job(other_host: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This host's rank of a job of two."""
    import xvcomm

    settings = {
        "RANK": other_host.index, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "SECRET": "hush", "DEVICE": "host",
        "STORE": f"tcp://{other_host.address(0, 0)}:29700", "TIMEOUT": 240, "NICS": "10.77.0.0/16",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(f"XVCOMM_{name}", str(value))
    with xvcomm.init() as joined:
        yield joined


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.05)


def add_up(job: Any, turn: int) -> None:
    mine = np.arange(COUNT, dtype=np.int64) * (job.rank + 1) + turn
    assert (np.asarray(job.all_reduce(mine)) == np.arange(COUNT, dtype=np.int64) * 3 + 2 * turn).all()


def over_rdma(job: Any) -> dict[str, list[Any]]:
    """The rails of RDMA, by this host's address."""
    found: dict[str, list[Any]] = {}
    for rail in job.rails():
        if rail.scheme == "rdma":
            found.setdefault(rail.local, []).append(rail)
    return found


def sent_by(job: Any) -> dict[str, int]:
    """How many bytes have gone over rails of RDMA, by this host's address."""
    return {address: sum(rail.sent for rail in rails) for address, rails in over_rdma(job).items()}


def test_a_job_sends_over_both_nics_and_without_one(other_host: Any, job: Any) -> None:
    addresses = [other_host.address(other_host.index, nic) for nic in (0, 1)]
    add_up(job, 0)
    until(lambda: [len(over_rdma(job).get(address, [])) for address in addresses] == [2, 2])
    other_host.swap()
    before = sent_by(job)
    for _ in range(4):
        add_up(job, 1)
    carried = {address: sent - before[address] for address, sent in sent_by(job).items()}
    assert sorted(carried) == addresses and min(carried.values()) > COUNT, carried
    other_host.swap()
    if other_host.index == 1:
        subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    for turn in range(4):
        add_up(job, 2 + turn)
    until(lambda: list(over_rdma(job)) == addresses[:1])
    add_up(job, 6)
    other_host.swap()
    if other_host.index == 1:
        subprocess.run(["ip", "link", "set", "eth1", "up"], check=True)
    until(lambda: sorted(over_rdma(job)) == addresses)
    add_up(job, 7)
    other_host.swap()
