"""Metrics over HTTP, compared with what ranks have done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import xvcomm
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import Aborted, BackendUnavailable, ConfigError, ResourceError
from xvcomm.testing import World
from xvcomm.testing.inside import network
from xvcomm.wire.records import UP

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install 'xvcomm[metrics]'")

HERE = {"XVCOMM_METRICS": "127.0.0.1:0"}
ALONE = {"XVCOMM_DEVICE": "host"}


def text_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


class Scrape:
    """What one rank tells: its samples, by name."""

    def __init__(self, port: int) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text_of(port)):
            for sample in family.samples:
                self._samples[sample.name].append((dict(sample.labels), sample.value))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        return sum(value for found, value in self._samples[name] if labels.items() <= found.items())

    def by_communicator(self, name: str, **labels: str) -> Counter[str]:
        """The same for each communicator."""
        found = Counter[str]()
        for each, value in self._samples[name]:
            if labels.items() <= each.items():
                found[each["communicator"]] += int(value)
        return found

    def values(self, name: str, label: str) -> set[str]:
        return {found[label] for found, _ in self._samples[name]}


def port(comm: Communicator) -> int:
    found = comm.metrics_port()
    assert found is not None
    return found


def scrapes(world: World) -> list[Scrape]:
    return [Scrape(each) for each in world.run(port)]


@pytest.fixture
def world() -> Iterator[World]:
    with World(2, env={**HERE, "XVCOMM_JOB": "night", "XVCOMM_TRACE_RECORDS": "16"}) as ranks:
        yield ranks


def operate(comm: Communicator) -> None:
    """300 reductions of 16 bytes, 20 messages of 24, one started and ended; more than the flight recorder keeps."""
    x, y = np.ones(4, np.float32), np.ones(3)
    for _ in range(300):
        comm.all_reduce(x)
    for _ in range(20):
        if comm.rank == 0:
            comm.send(y, 1)
        else:
            comm.recv(y, 0)
    comm.broadcast(y, 0, async_op=True).wait()
    part = comm.split(0)
    assert part is not None
    part.barrier()
    part.close()


def test_operations_bytes_and_seconds(world: World) -> None:
    begin = time.monotonic()
    world.run(operate)
    took = time.monotonic() - begin
    for rank, found in enumerate(scrapes(world)):
        message = ("send", "recv")[rank]
        for op, way, count, nbytes in (
            ("all_reduce", "host", 300, 4800), (message, "shm", 20, 480), ("broadcast", "host", 1, 24),
        ):  # fmt: skip
            labels = {"rank": str(rank), "job": "night", "communicator": "0", "op": op, "way": way}
            assert found.total("xvcomm_operations_total", **labels) == count
            assert found.total("xvcomm_operation_bytes_total", **labels) == nbytes
            assert found.total("xvcomm_operation_seconds_count", **labels) == count
            assert found.total("xvcomm_operation_seconds_bucket", **labels, le="+Inf") == count
            assert 0 < found.total("xvcomm_operation_seconds_sum", **labels) < took
        assert found.total("xvcomm_operations_total", op="barrier", communicator="0.1.0") == 1
        assert found.values("xvcomm_operations_running", "communicator") == {"0"}
        assert found.total("xvcomm_operations_running") == found.total("xvcomm_operations_failed_total") == 0
        assert found.total("xvcomm_info", **{"size": "2", "device": "host", "version": xvcomm.__version__}) == 1
        assert found.total("xvcomm_ring_bytes", memory="host") > 1 << 20
        assert found.values("xvcomm_lateness_seconds", "quantile") == {"0.5", "0.9", "1"}


def wait_for_nothing(comm: Communicator) -> str:
    try:
        comm.recv(np.zeros(1), 1)
    except Aborted as error:
        return str(error)
    return ""


def abort_soon(comm: Communicator, seen: threading.Event | None = None) -> float:
    """Rank 0 receives what rank 1 never sends, and is scraped meanwhile; then rank 1 aborts."""
    if comm.rank == 0:
        failing = threading.Thread(target=wait_for_nothing, args=[comm])
        failing.start()
        time.sleep(0.3)
        found = Scrape(port(comm))
        assert found.total("xvcomm_operations_running", communicator="0") == 1
        age = found.total("xvcomm_oldest_operation_seconds", communicator="0")
        comm.abort("for a test")
        failing.join()
        return age
    return 0.3


def test_what_is_under_way_and_what_has_failed(world: World) -> None:
    ages = world.run(abort_soon)
    assert all(0.1 < age < 10 for age in ages)
    found = scrapes(world)[0]
    assert found.total("xvcomm_operations_failed_total", op="recv") == found.total("xvcomm_aborted") == 1
    assert found.total("xvcomm_operations_running") == 0


def exchange(comm: Communicator) -> None:
    x = np.ones(1 << 18, np.uint8)
    for _ in range(3):
        comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank)


def test_connections_between_hosts() -> None:
    """Labelled as two hosts, over this machine's interfaces."""
    with World(hosts="a:1,b:1", env={**HERE, "XVCOMM_NICS": "lo"}) as world:
        world.run(exchange)
        for rank, found in enumerate(scrapes(world)):
            labels = {"peer": str(1 - rank), "scheme": "tcp"}
            assert found.total("xvcomm_rail_up", **labels) >= 1
            assert found.total("xvcomm_rail_bytes_total", direction="sent", **labels) > 3 << 18
            assert found.total("xvcomm_rail_bytes_total", direction="received", **labels) > 3 << 18
            assert found.total("xvcomm_rail_losses_total") == 0
            assert found.total("xvcomm_operations_total", way="tcp", op="send") == 3


def free(number: int) -> bool:
    """Whether a port of this host can be used."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return False
    return True


def lose_a_connection(comm: Communicator) -> None:
    """As if it broke; there are others."""
    if comm.rank == 0:
        carrier = network(comm).carrier
        first, *others = (index for index, rail in enumerate(carrier.rails) if rail.state == UP)
        assert others
        carrier.drop(first)
    exchange(comm)


def test_lost_connections_are_counted() -> None:
    with World(hosts="a:1,b:1", env={**HERE, "XVCOMM_NICS": "lo", "XVCOMM_WIRE_THREADS": "3"}) as world:
        world.run(exchange)
        before = scrapes(world)
        world.run(lose_a_connection)
        until = time.monotonic() + 10
        while True:
            after = scrapes(world)
            if all(found.total("xvcomm_rail_losses_total") == 1 for found in after):
                break
            assert time.monotonic() < until
            time.sleep(0.05)
        for old, new in zip(before, after, strict=True):
            sent = [found.total("xvcomm_rail_bytes_total", direction="sent") for found in (old, new)]
            assert sent[1] - sent[0] > 3 << 18


def lose_a_connection_halfway(comm: Communicator) -> None:
    """While slots are under way over it."""
    x, carrier = np.ones(1 << 25, np.uint8), network(comm).carrier
    exchange(comm)  # there are connections
    begun = sum(rail.sent for rail in carrier.rails)
    working = threading.Thread(target=lambda: comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank))
    working.start()
    while comm.rank == 0 and working.is_alive():
        up = [index for index, rail in enumerate(carrier.rails) if rail.state == UP]
        if len(up) > 1 and sum(rail.sent for rail in carrier.rails) > begun + (1 << 22):
            carrier.drop(up[0])
            break
    working.join()


def test_slots_that_are_sent_again_are_counted() -> None:
    with World(hosts="a:1,b:1", env={**HERE, "XVCOMM_NICS": "lo", "XVCOMM_WIRE_THREADS": "3"}) as world:
        world.run(exchange)
        assert [found.total("xvcomm_rail_retries_total") for found in scrapes(world)] == [0, 0]
        until = time.monotonic() + 60
        while not any(found.total("xvcomm_rail_retries_total") for found in scrapes(world)):
            assert time.monotonic() < until
            world.run(lose_a_connection_halfway)


def leave(comm: Communicator) -> list[str]:
    number = port(comm)
    comm.close()
    left = [thread.name for thread in threading.enumerate() if thread.name == "xvcomm-metrics"]
    with socket.socket() as probe:
        return left if probe.connect_ex(("127.0.0.1", number)) else [*left, "a socket"]


def fork_and_leave(comm: Communicator) -> list[str]:
    """A forked child does not keep the socket."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)
        os._exit(0)
    try:
        return leave(comm)
    finally:
        os.close(tell)
        os.close(told)
        os.waitpid(child, 0)


@pytest.mark.parametrize("how", [leave, fork_and_leave])
def test_nothing_is_left(world: World, how: object) -> None:
    assert world.run(how) == [[], []]


def test_page_and_dashboard_name_the_metrics_that_there_are(root: Path) -> None:
    with xvcomm.init(env={**ALONE, **HERE}) as comm:
        kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text_of(port(comm)), re.M))
    parts = {
        f"{name}{part}" for name, kind in kinds.items() if kind == "histogram" for part in ("_bucket", "_count", "_sum")
    }
    page = dict(re.findall(r"^\| `(xvcomm_\w+)` \| (\w+) \|", (root / "docs" / "observability.md").read_text(), re.M))
    assert page == kinds
    dashboard = json.loads((root / "docs" / "grafana.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"xvcomm_\w+", target["expr"])
    }
    assert used <= kinds.keys() | parts and len(used) > 10


def test_ranks_of_a_host_take_ports_that_follow_each_other() -> None:
    first = next(number for number in range(21_000, 22_000, 7) if free(number) and free(number + 1))
    with World(2, env={"XVCOMM_METRICS": f"127.0.0.1:{first}"}) as world:
        assert world.run(port) == [first, first + 1]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"cannot listen on 127.0.0.1:{used}: .*choose another port"):
            xvcomm.init(env={**ALONE, "XVCOMM_METRICS": f"127.0.0.1:{used}"})


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'xvcomm\[metrics\]'"):
        xvcomm.init(env={**ALONE, **HERE})
    with xvcomm.init(env=ALONE) as comm:
        assert comm.metrics_port() is None


@pytest.mark.parametrize("address", ["9400", ":port", "10.0.0.1", "::1:9400"])
def test_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address and a port"):
        xvcomm.init(env={**ALONE, "XVCOMM_METRICS": address})


def test_a_client_that_says_nothing_does_not_hold_up_others() -> None:
    with xvcomm.init(env={**ALONE, **HERE}) as comm, socket.create_connection(("127.0.0.1", port(comm))):
        assert Scrape(port(comm)).total("xvcomm_info") == 1


def test_slow_clients_do_not_hold_up_others() -> None:
    """Also several, each of which has two seconds."""
    with xvcomm.init(env={**ALONE, **HERE}) as comm, contextlib.ExitStack() as slow:
        for _ in range(8):
            client = slow.enter_context(socket.create_connection(("127.0.0.1", port(comm))))
            client.sendall(b"GET /metr")
        begun = time.monotonic()
        assert Scrape(port(comm)).total("xvcomm_info") == 1
        assert time.monotonic() - begun < 16  # as long as they would take in turn


def test_metrics_of_a_job_that_goes_on() -> None:
    """They are served until the job ends, on one port, while communicators take each other's place."""
    with xvcomm.init(env={**ALONE, **HERE}) as comm:
        comm.all_reduce(np.ones(3))
        made = comm.shrink()
        assert port(made) == port(comm)
        made.all_reduce(np.ones(3))
        assert Scrape(port(made)).total("xvcomm_operations_total") >= 2
        made.grow().close()


def test_communicators_without_end_have_no_series_without_end() -> None:
    """No count falls meanwhile, and none is without a name."""
    before, total = {}, 0.0
    with xvcomm.init(env={**ALONE, **HERE}) as comm:
        for number in range(200):
            part = comm.split(0)
            assert part is not None
            part.all_reduce(np.ones(4))
            part.close()
            if number % 20 in (0, 19):
                found = Scrape(port(comm))
                now = found.by_communicator("xvcomm_operation_seconds_count", op="all_reduce")
                assert all(now[name] >= count for name, count in before.items())
                before, total = now, sum(now.values())
        assert total == 200 and 50 < len(before) < 70 and before["others"] > 130 and "" not in before
        assert found.values("xvcomm_operations_running", "communicator") == {"0"}


def test_without_the_setting_there_is_no_thread() -> None:
    before = Counter(thread.name for thread in threading.enumerate())
    with xvcomm.init(env=ALONE):
        assert "xvcomm-metrics" not in Counter(thread.name for thread in threading.enumerate()) - before
