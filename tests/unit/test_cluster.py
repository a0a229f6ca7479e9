"""`xvcomm doctor --cluster`: what counts as a difference, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from xvcomm.abc.transport import Interface
from xvcomm.backends.tcp import TcpTransport
from xvcomm.cli import facts
from xvcomm.cli.cluster import RankReport, apart, blocked, differences, ranks_text
from xvcomm.cli.facts import Fact
from xvcomm.cli.reach import Reach
from xvcomm.config import Config
from xvcomm.types.route import Route


def report(host: str, *told: Fact, ahead: float = 0.0) -> RankReport:
    return RankReport(host, host, list(told), ahead)


def fact(value: str, among: str = "") -> Fact:
    return Fact("torch", value, "install", among)


def test_equal_ranks_have_no_differences() -> None:
    assert differences([report("a", fact("2.9")), report("b", fact("2.9")), report("b")]) == []


def test_a_difference_has_each_value_with_its_ranks_and_the_remedy() -> None:
    (found,) = differences([report("a", fact("2.9")), report("b", fact("2.8")), report("c", fact("2.9"))])
    assert (found.what, found.remedy) == ("torch", "install")
    assert found.values == [("2.9", "a, c"), ("2.8", "b")]


def test_only_ranks_of_one_kind_are_compared() -> None:
    assert differences([report("a", fact("1", "cuda")), report("b", fact("2", "rocm"))]) == []
    (found,) = differences([report("a", fact("1", "cuda")), report("b", fact("2", "cuda"))])
    assert [value for value, _ in found.values] == ["1", "2"]


def test_clocks() -> None:
    assert differences([report("a"), report("b", ahead=0.05)]) == []
    (found,) = differences([report("a"), report("b", ahead=-3.21)])
    assert found.values == [("-3.2 s", "b")]


@pytest.mark.parametrize(("theirs", "ahead"), [(10.0, 0.0), (10.4, 0.0), (15.0, -4.5), (7.0, 3.0)])
def test_a_clock_is_apart_by_what_the_question_cannot_explain(theirs: float, ahead: float) -> None:
    assert apart(10.0, theirs, 10.5) == ahead


def test_ranks_are_told_by_their_hosts_where_all_of_these_have_the_value() -> None:
    reports = [report(f"h{rank // 2}") for rank in range(20)]
    assert ranks_text([0, 1, 4, 5], reports) == "h0, h2"
    assert ranks_text([0, 1, 4], reports) == "ranks 0, 1, 4"
    assert ranks_text([7], reports) == "rank 7"
    assert ranks_text(range(20), reports) == "h0, h1, h2, h3, h4, h5 and 4 other hosts"
    assert ranks_text(range(1, 20), reports) == "ranks 1, 2, 3, 4, 5, 6 and 13 other ranks"


def test_blocked_connections() -> None:
    route = Route("10.0.0.1", "10.0.0.2", 29600, ("eth0", "eth1"))
    found = list(blocked(Reach(["a", "b"], {(0, 1): {route: "no answer"}, (1, 0): {}})))
    assert [one.what for one in found] == ["blocked connections", "hosts"]
    assert found[0].values == [(f"{route}: no answer", "a to b")]
    assert found[1].values == [("do not reach each other", "a and b")]
    assert list(blocked(Reach(["a", "b"], {(0, 1): {route: ""}, (1, 0): {route: ""}}))) == []


def test_mtus_are_compared_by_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = [Interface("eth0", "10.0.0.7/24", True, ""), Interface("eth1", "10.1.0.7/24", False, "")]
    monkeypatch.setattr(TcpTransport, "interfaces", lambda config, env: used)
    for name in ("eth0", "eth1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mtu").write_text("9000\n")
    told = facts.facts(Config(), {}, "host", net=tmp_path)
    mtus = [one for one in told if one.what.startswith("MTU")]
    assert [(one.what, one.value, one.among) for one in mtus] == [("MTU in 10.0.0.0/24", "9000", "10.0.0.0/24")]


def test_settings_that_say_where_a_rank_is_are_not_compared() -> None:
    told = {one.what: one for one in facts.facts(Config(rank=3, secret="hush", nics="eth7"), {}, "host")}
    assert told["XVCOMM_RING_SLOTS"].value == str(Config().ring_slots)
    assert told["XVCOMM_SHM_DIR"].among == "host"
    assert not {"XVCOMM_RANK", "XVCOMM_SECRET", "XVCOMM_NICS"} & told.keys()
    assert "hush" not in str(told)


def test_a_device_that_does_not_work_is_told() -> None:
    (device,) = (one for one in facts.facts(Config(device="gone"), {}, "host") if one.what == "device")
    assert "'gone'" in device.value
