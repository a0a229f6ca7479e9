"""Which RDMA devices of two hosts form queue pairs: what several ranks have found, merged and told."""

from __future__ import annotations

import pytest

from xvcomm.abc.cards import QueueEnd
from xvcomm.abc.transport import Interface, PairTrial
from xvcomm.backends.rdma.report import DeviceReport, Obstacle, PortReport
from xvcomm.cli import queue_pairs
from xvcomm.cli.cluster import blocked
from xvcomm.cli.queue_pairs import Devices, QueuePairs, merge
from xvcomm.cli.reach import Reach
from xvcomm.config import Config
from xvcomm.types.route import RDMA, Route

BOTH = Devices(("mlx0 port 1", "mlx1 port 1"))


def trial(here: int, there: int, refusal: str = "", *, nic: tuple[int, int] = (0, 0), told: bool = True) -> PairTrial:
    """Of a device of host `here` with one of host `there`; `nic` numbers them."""
    addresses = [f"10.{number}.0.{host}" for number, host in zip(nic, (here, there), strict=True)]
    route = Route(addresses[0], addresses[1], 29600, (f"eth{nic[0]}", f"eth{nic[1]}"), RDMA)
    ends = [
        QueueEnd(f"mlx{number}", 1, address) if told else None for number, address in zip(nic, addresses, strict=True)
    ]
    return PairTrial(route, ends[0], ends[1], refusal)


def two_hosts(there: list[PairTrial], back: list[PairTrial], *more: list[PairTrial]) -> QueuePairs:
    """What rank 0 of host a has found, rank 1 of host b, and further ranks of a."""
    places = [0, 1, *(0 for _ in more)]
    found = [[(1, there)], [(0, back)], *([(1, each)] for each in more)]
    return merge(["a", "b"], places, found, [BOTH] * len(places))


def test_devices_are_joined_if_one_of_the_hosts_can() -> None:
    found = two_hosts([trial(0, 1, "no connection", told=False)], [trial(1, 0)])
    assert list(found.lines()) == [
        "Queue pairs of RDMA devices:",
        "a to b: mlx0 port 1, GID 10.0.0.0, to mlx0 port 1, GID 10.0.0.1",
    ]


def test_a_failure_is_told_by_the_host_that_knows_the_devices() -> None:
    found = two_hosts([trial(0, 1, "no connection", told=False)], [trial(1, 0, "no path")])
    assert list(found.refusals()) == [
        ("a to b", "mlx0 port 1, GID 10.0.0.0, to mlx0 port 1, GID 10.0.0.1: no path"),
    ]


def test_all_ranks_of_a_host_must_join_them() -> None:
    found = two_hosts([trial(0, 1)], [trial(1, 0, "no path")], [trial(0, 1, "no memory")])
    assert [one.refusal for one in found.trials[0, 1]] == ["no memory"]


def test_what_others_make_up_for_is_only_told_to_programs() -> None:
    joined = [trial(0, 1, nic=(n, n)) for n in range(2)]
    crossed = [trial(0, 1, "no path", nic=(n, 1 - n)) for n in range(2)]
    found = two_hosts([*joined, *crossed], [])
    assert found.joined((0, 1)) == joined and not found.missing((0, 1))
    assert "no path" not in "".join(found.lines())
    plain = found.plain()
    assert [pair["refusal"] for pair in plain["pairs"]] == ["", "", "no path", "no path"]
    assert plain["pairs"][3]["here"] == {"device": "mlx1", "port": 1, "gid": "10.1.0.0", "lid": 0}
    assert plain["devices"]["a"] == {"used": ["mlx0 port 1", "mlx1 port 1"], "unused": []}


def test_ports_of_infiniband() -> None:
    """With LIDs; of the other host's trial the connection is turned round, too."""
    route = Route("fe80::2", "fe80::1", 29600, ("mlx5_1:1", "mlx5_0:1"), RDMA, ("10.0.0.2", "10.0.0.1"))
    back = PairTrial(route, QueueEnd("mlx5_1", 1, "fe80::2", 9), QueueEnd("mlx5_0", 1, "fe80::1", 5), "")
    here = PairTrial(
        Route("fe80::1", "fe80::2", 29600, ("mlx5_0:1", "mlx5_1:1"), RDMA, ("10.0.0.1", "10.0.0.2")), None, None, "no"
    )
    found = two_hosts([here], [back])
    assert list(found.lines()) == [
        "Queue pairs of RDMA devices:",
        "a to b: mlx5_0 port 1, LID 5, GID fe80::1, to mlx5_1 port 1, LID 9, GID fe80::2",
    ]
    (plain,) = found.plain()["pairs"]
    assert plain["via"] == ("10.0.0.1", "10.0.0.2") and plain["here"]["lid"] == 5


def test_devices_that_form_no_queue_pairs() -> None:
    found = two_hosts([trial(0, 1), trial(0, 1, "no path", nic=(1, 1), told=False)], [])
    what = "10.1.0.0 (eth1), to 10.1.0.1 (eth1): no path"
    assert list(found.lines())[2:] == [
        "Devices that form none, and would add one each:",
        f"a to b: {what}",
        f"Remedy: {queue_pairs.REMEDY}",
    ]
    route = Route("10.0.0.0", "10.0.0.1", 1, ("eth0", "eth0"))
    ways = {(0, 1): {route: ""}, (1, 0): {route: ""}}
    (difference,) = blocked(Reach(["a", "b"], ways, found))
    assert difference.values == [(what, "a to b")] and difference.remedy == queue_pairs.REMEDY


def test_devices_that_are_not_in_use() -> None:
    off = Devices((), (("mlx0 port 1", "port 1 is down; plug the cable in"),))
    found = merge(["a", "b", "c"], [0, 1, 1, 2], [[], [], [], []], [BOTH, off, off, Devices()])
    assert list(found.lines()) == [
        "RDMA devices that are not in use:",
        "b: mlx0 port 1: port 1 is down; plug the cable in",
        "c has none",
    ]


def test_nothing_is_told_where_no_host_has_a_device() -> None:
    found = merge(["a", "b"], [0, 1], [[], []], [Devices(), Devices()])
    assert list(found.lines()) == []
    assert found.plain() == {"devices": {name: {"used": [], "unused": []} for name in "ab"}, "pairs": []}


def test_ports_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each port has the obstacles of its device, too; a device may have none."""

    def port(number: int, *obstacles: Obstacle) -> PortReport:
        return PortReport(number, "active", "Ethernet", 1024, 0, [], [], list(obstacles))

    def device(name: str, ports: list[PortReport], *obstacles: Obstacle) -> DeviceReport:
        return DeviceReport(name, "", -1, "", "", ports, not obstacles, list(obstacles))

    asked: list[list[Interface]] = []

    def examine(config: Config, env: object, interfaces: list[Interface]) -> list[DeviceReport]:
        asked.append(interfaces)
        return [
            device("mlx0", [port(1), port(2, Obstacle("port 2 is down", "plug the cable in"))]),
            device("mlx1", [port(1)], Obstacle("XVCOMM_RDMA=0", "")),
            device("mlx2", [], Obstacle("it is missing", "load it")),
        ]

    monkeypatch.setattr(queue_pairs.report, "examine", examine)
    assert queue_pairs.devices(Config(), {}) == Devices(
        ("mlx0 port 1",),
        (
            ("mlx0 port 2", "port 2 is down; plug the cable in"),
            ("mlx1 port 1", "XVCOMM_RDMA=0"),
            ("mlx2", "it is missing; load it"),
        ),
    )
    assert "lo" in [interface.name for interface in asked[0]]
