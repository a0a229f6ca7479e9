"""Networks of several shapes between two hosts: which connections come up, and what is said where some cannot."""

import json
import os
import re
import shutil
import subprocess
import threading
import time

import pytest

from xvcomm.types import cluster

SUBNETS = {"addresses": ["10.{side}.{link}.1/24"]}
"""Each interface is in a network of its own; see `routed`."""
SIX = "fd77:{link}::{side}/64"
BOTH = {"addresses": ["10.77.{link}.{side}/24", SIX]}
STRAIGHT = [["10.1.0.1", "10.2.0.1"], ["10.1.1.1", "10.2.1.1"]]
CROSSED = [["10.1.0.1", "10.2.1.1"], ["10.1.1.1", "10.2.0.1"]]


@pytest.fixture
def routed(two_hosts):
    """Two hosts whose interfaces are in networks of their own, with routes between those that a link joins."""
    for side in range(2):
        for link in range(2):
            two_hosts.ip(side, "route", "add", f"10.{2 - side}.{link}.0/24", "dev", two_hosts.interface(side, link))
    return two_hosts


def forbid(hosts, here, there):
    """Let host 0 send nothing from one address to another one, nor answer there."""
    family = ("-6",) if ":" in there else ()
    hosts.ip(0, *family, "rule", "add", "from", here, "to", there, "prohibit")


def reach(hosts, *options, code=0, **job):
    """What `xvcomm doctor --reach` prints."""
    return doctor(hosts, "--reach", *options, code=code, **job)


def doctor(hosts, *options, code=0, **job):
    """What `xvcomm doctor` prints as the ranks of a job; `code` is its exit code on rank 0."""
    ranks = hosts.start_command("doctor", *options, **job)
    first, *others = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, *(0 for _ in others)], (first, others)
    return first[first.index("{") :] if "--json" in options else first


def rails(hosts, count, **env):
    """The addresses of the connections between the hosts, host 0's first, once there are so many."""
    first, second = (json.loads(text.splitlines()[-1]) for text in hosts.run("rails", str(count), env=env))
    assert first == sorted([there, here] for here, there in second)
    return first


@pytest.mark.parametrize("two_hosts", [SUBNETS], indirect=True)
def test_own_networks(routed):
    """Interfaces of different networks are joined in their order."""
    assert rails(routed, 2) == STRAIGHT


@pytest.mark.parametrize("two_hosts", [SUBNETS], indirect=True)
def test_crossed_networks(routed):
    """Interfaces that do not reach each other in their order are joined as they do."""
    for here, there in STRAIGHT:
        forbid(routed, here, there)
    routed.ip(1, "route", "change", "10.1.0.0/24", "dev", routed.interface(1, 0), "src", "10.2.1.1")  # to the store
    assert rails(routed, 2) == CROSSED


@pytest.mark.parametrize("two_hosts", [BOTH], indirect=True)
def test_two_families(two_hosts):
    """IPv4 and IPv6 of the same interfaces are one way, not two; IPv6 is used where IPv4 does not work."""
    four, six = [["10.77.0.1", "10.77.0.2"], ["10.77.1.1", "10.77.1.2"]], ["fd77:1::1", "fd77:1::2"]
    assert rails(two_hosts, 2) == four
    forbid(two_hosts, *four[1])
    assert rails(two_hosts, 2) == [four[0], six]


@pytest.mark.parametrize("two_hosts", [{"addresses": [SIX]}], indirect=True)
def test_only_six(two_hosts):
    """Hosts may have IPv6 addresses only."""
    assert rails(two_hosts, 2) == [["fd77:1::1", "fd77:1::2"], ["fd77::1", "fd77::2"]]


def test_blocked_interface(two_hosts):
    """An interface that reaches nothing is named once, with the addresses and the reason; the others do its work."""
    forbid(two_hosts, "10.77.1.1", "10.77.1.2")
    first, second = two_hosts.run("rails", "2")  # which do not come
    assert all(len(json.loads(text.splitlines()[-1])) == 1 for text in (first, second))
    (said,) = re.findall(r"v\w+1 \(10.77.1.\d\) carries nothing to rank \d: .*", first + second)
    there = r"10.77.1.1 \(v\w+1\) to 10.77.1.2 \(v\w+1\) port \d+: Permission denied"
    back = r"10.77.1.2 \(v\w+1\) to 10.77.1.1 \(v\w+1\) port \d+: no answer"
    assert re.search(f"{there}|{back}", said) and "XVCOMM_NICS" in said


def test_lost_interface(two_hosts):
    """An interface whose link does not come back is named, too; one whose link comes back soon is not."""
    ranks = two_hosts.begun(9)
    two_hosts.link(0, "down")
    time.sleep(1)
    two_hosts.link(0, "up")
    two_hosts.link(1, "down")
    text = "".join(two_hosts.outputs(ranks))
    assert re.findall(r"\((10.77.\d.\d)\) carries nothing to rank \d: ", text) in (["10.77.1.1"], ["10.77.1.2"]), text


def test_slow_route(two_hosts):
    """A route that does not answer holds up no other: a lost connection is made again at once."""
    for side in range(2):
        two_hosts.mute(side, 1)
    two_hosts.run("redial")


def test_refused_first(two_hosts, tmp_path):
    """A process is not lost because nobody listens at one of its addresses, while another one does not answer yet."""
    ranks = two_hosts.start("misled", tmp_path / "go")
    assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
    two_hosts.link(1, "down")
    mend = threading.Timer(3, two_hosts.link, (1, "up"))
    mend.start()
    (tmp_path / "go").touch()
    two_hosts.outputs(ranks)


UNJOINED = [(f"10.77.{here}.1", f"10.77.{there}.2") for here in range(2) for there in range(2)]
"""The addresses of two of three links, on host 0 and on host 1."""
ASIDE = {
    "XVCOMM_NICS": "10.77.0.0/24,10.77.1.0/24", "XVCOMM_STORE": "tcp://10.77.2.1:29711", "XVCOMM_PEER_TIMEOUT": "1.5",
    "XVCOMM_PORTS": "29720-29729",
}  # fmt: skip
"""Variables of a job that uses these two, and the third one for the store."""


@pytest.fixture
def unjoined(two_hosts):
    """Two hosts whose ranks find each other in the store, and cannot connect to each other."""
    for here, there in UNJOINED:
        forbid(two_hosts, here, there)
    return two_hosts


@pytest.mark.parametrize("two_hosts", [{"links": 3}], indirect=True)
def test_no_way(unjoined):
    """Where no address reaches another one, the error lists what was tried, with the reasons and what to do."""
    ranks = unjoined.start("collectives", env=ASIDE)
    texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert all(rank.returncode == 1 and "PeerLost" in text for rank, text in zip(ranks, texts, strict=True)), texts
    told = next(text for text in texts if "it cannot be reached" in text)
    first = "Permission denied" in told
    for here, there in UNJOINED:
        way = rf"{here} \(v\w+\) to {there} \(v\w+\)" if first else rf"{there} \(v\w+\) to {here} \(v\w+\)"
        assert re.search(rf"{way} port 297\d\d: {'Permission denied' if first else 'no answer'}", told), told
    assert "xvcomm doctor --reach" in told


@pytest.mark.parametrize("two_hosts", [{"links": 3}], indirect=True)
def test_hosts_apart(unjoined):
    """`xvcomm doctor --reach` lists what does not work between hosts, and fails."""
    text = reach(unjoined, code=1, env=ASIDE)
    assert "a and b do not reach each other" in text
    for here, there in UNJOINED:
        assert re.search(rf"a to b: {here} \(v\w+\) to {there} \(v\w+\) port 297\d\d: Permission denied\n", text), text
        assert re.search(rf"b to a: {there} \(v\w+\) to {here} \(v\w+\) port 297\d\d: no answer\n", text), text
    assert "Remedy: let the hosts reach each other there" in text


@pytest.mark.parametrize("two_hosts", [SUBNETS], indirect=True)
def test_who_reaches_whom(routed):
    """`xvcomm doctor --reach` says by which interfaces hosts reach each other, for several ranks a host."""
    found = json.loads(reach(routed, "--json", sides=(0, 1, 0)))
    assert found["hosts"] == ["a", "b"] and not found["blocked"]
    there = [[rail["local"], rail["remote"]] for rail in found["rails"] if rail["from"] == "a"]
    back = [[rail["remote"], rail["local"]] for rail in found["rails"] if rail["from"] == "b"]
    assert there == back == STRAIGHT
    for pair in (STRAIGHT[1], *CROSSED):
        forbid(routed, *pair)
    text = reach(routed, sides=(1, 0, 1), env={"COLUMNS": "100", "XVCOMM_STORE": "tcp://b:29711"})
    names = [[routed.interface(side, link) for side in range(2)] for link in range(2)]
    assert "All hosts reach each other." in text
    assert re.search(rf"│ a +│ 1: {names[0][0]} to {names[0][1]} +│ - ", text), text
    assert re.search(
        rf"a to b: 10.1.1.1 \({names[1][0]}\) to 10.2.1.1 \({names[1][1]}\) port \d+: Permission denied", text
    )
    assert re.search(rf"b to a: 10.2.1.1 \({names[1][1]}\) to 10.1.1.1 \({names[1][0]}\) port \d+: no answer", text)
    assert text.count(" port ") == 2, text


@pytest.mark.parametrize("two_hosts", [SUBNETS], indirect=True)
def test_what_differs(routed):
    """`xvcomm doctor --cluster` lists what is blocked between hosts."""
    forbid(routed, *STRAIGHT[1])
    for pair in CROSSED:
        forbid(routed, *pair)
    found = json.loads(doctor(routed, "--cluster", "--json", code=1))
    (told,) = found["differences"]
    assert found["hosts"] == ["a", "b"] and told["what"] == "blocked connections"
    assert sorted(where for _, where in told["values"]) == ["a to b", "b to a"]
    assert "Permission denied" in str(told["values"])


def test_mtus_differ(two_hosts):
    """And networks with an MTU of their own at each end."""
    two_hosts.ip(1, "link", "set", two_hosts.interface(1, 0), "mtu", "1400")
    (told,) = json.loads(doctor(two_hosts, "--cluster", "--json", code=1))["differences"]
    assert told["what"].startswith("MTU in ") and told["values"] == [["1500", "a"], ["1400", "b"]]
    assert "ip link set" in told["remedy"]


@pytest.mark.parametrize("two_hosts", [{"rate": ["200mbit", "10mbit"]}], indirect=True)
def test_topology(two_hosts, tmp_path):
    """`xvcomm topo` measures what each connection of both hosts can carry, also what messages do not use."""
    file, picture = tmp_path / "topo.json", tmp_path / "topo.svg"
    ranks = two_hosts.start_command("topo", "--out", file, "--svg", picture, sides=(0, 0, 1, 1))
    first, *others = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4 and not any(others), (first, others)
    assert "host a\n  rank 0  island host  host\n" in first
    found = cluster.read(file.read_bytes())
    assert [[place.rank for place in host.ranks] for host in found.hosts] == [[0, 1], [2, 3]]
    assert [[nic.name for nic in host.nics] for host in found.hosts] == [
        [two_hosts.interface(side, link) for link in range(2)] for side in range(2)
    ]
    for text in (first, picture.read_text()):
        speeds = re.findall(r"10\.77\.(\d)\.[12] to 10\.77\.\1\.[12] .*?(\d\S*) MB/s alone", text)
        assert {link for link, _ in speeds} == {"0", "1"}, text
        for link, speed in speeds:
            assert float(speed) == pytest.approx((25, 1.25)[int(link)], rel=0.25), text
    for source in "ab":
        assert sum(rail.share for rail in found.rails if rail.source == source) > 2e6, found.rails


@pytest.mark.parametrize("two_hosts", [{"addresses": [SIX]}], indirect=True)
def test_who_reaches_whom_by_six(two_hosts):
    found = json.loads(reach(two_hosts, "--json"))
    locals_of_rails = [rail["local"] for rail in found["rails"]]
    assert locals_of_rails == ["fd77::1", "fd77:1::1", "fd77::2", "fd77:1::2"], found["blocked"]


@pytest.mark.parametrize("launcher", ["xvcomm run -n 4 --", "mpirun --allow-run-as-root --oversubscribe -n 4"])
def test_who_reaches_whom_by_launcher(launcher):
    """`xvcomm doctor --reach` finds the ranks as any launcher has started them; here on three hosts by label."""
    if shutil.which(launcher.split()[0]) is None:
        pytest.skip(f"no {launcher.split()[0]}")
    label = "XVCOMM_HOST=h$((${OMPI_COMM_WORLD_RANK:-$XVCOMM_RANK} % 3)) exec xvcomm doctor --reach"
    env = {**os.environ, "COLUMNS": "100", "XVCOMM_SECRET": "of this test"}
    done = subprocess.run([*launcher.split(), "sh", "-c", label], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "All hosts reach each other." in done.stdout, done
    for host in range(3):
        cells = [r"1: lo to lo +│ " if other != host else r"- +│ " for other in range(3)]
        assert re.search(rf"│ h{host} +│ {''.join(cells)}".rstrip(), done.stdout), done.stdout
