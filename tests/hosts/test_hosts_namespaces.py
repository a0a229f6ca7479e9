"""Jobs over two hosts, each a network namespace, with two links between them."""

import json
import re
import time
from pathlib import Path

import pytest


def test_collectives(two_hosts):
    """All that a job does crosses between the hosts."""
    assert two_hosts.run("collectives") == ["2 hosts\n"] * 2


def test_chosen_interface(two_hosts):
    """One network is enough, chosen by its addresses."""
    two_hosts.run("collectives", env={"XVCOMM_NICS": "10.77.0.0/24"})


@pytest.mark.parametrize(("ports", "allowed"), [("29720", {29720}), ("29720-29721", {29720, 29721})])
def test_fixed_ports(two_hosts, ports, allowed):
    """Ranks listen on the ports that are allowed, each rank of a host on one of its own."""
    sides = (0, 1) if len(allowed) == 1 else (0, 1, 0, 1)
    for text in two_hosts.run("listening", sides=sides, env={"XVCOMM_PORTS": ports}):
        used = {port for _, port in json.loads(text.splitlines()[-1])} - {29711}
        assert len(used) == 1 and used <= allowed, text


def congestion(two_hosts, chosen=""):
    """TCP's congestion control of the connections of both ranks."""
    texts = two_hosts.run("congestion", env={"XVCOMM_TCP_CONGESTION": chosen} if chosen else {})
    return [json.loads(text.splitlines()[-1]) for text in texts]


@pytest.mark.parametrize("two_hosts", [{"congestion": "reno"}], indirect=True, ids=["reno"])
def test_congestion_control(two_hosts):
    """The system's, or another one that it allows."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    other = next(name for name in available if name != "reno")
    assert congestion(two_hosts) == [["reno"], ["reno"]]
    assert congestion(two_hosts, other) == [[other], [other]]


@pytest.mark.parametrize("two_hosts", [{"congestion": "bbr"}], indirect=True, ids=["bbr"])
def test_congestion_control_that_makes_pauses(two_hosts):
    """Connections to near hosts do not have it, unless it was chosen for xvcomm."""
    assert all("bbr" not in found for found in congestion(two_hosts))
    assert congestion(two_hosts, "bbr") == [["bbr"], ["bbr"]]


@pytest.mark.parametrize("two_hosts", [{"congestion": "bbr"}], indirect=True, ids=["bbr"])
def test_connections_begin_without_pauses(two_hosts):
    """Else Linux paces them ever after."""
    found = [json.loads(text.splitlines()[-1]) for text in two_hosts.run("beginnings")]
    listening = {name for names, _ in found for name in names}
    assert listening and "bbr" not in listening and all(name != "bbr" for _, name in found)


def test_congestion_control_that_there_is_not(two_hosts):
    for process in two_hosts.start("congestion", env={"XVCOMM_TCP_CONGESTION": "none"}):
        text = process.communicate(timeout=60)[0]
        assert "ConfigError: XVCOMM_TCP_CONGESTION=none: " in text and "lets every user choose" in text


@pytest.mark.parametrize(("nics", "networks"), [("", (0, 1)), ("10.77.1.0/24", (1,))])
def test_listening(two_hosts, nics, networks):
    """A rank listens on loopback and on the interfaces in use; also where the store is, to serve it or what takes its place."""
    for host, text in enumerate(two_hosts.run("listening", env={"XVCOMM_NICS": nics})):
        due = {"127.0.0.1", f"10.77.0.{host + 1}", *(f"10.77.{network}.{host + 1}" for network in networks)}
        assert {address for address, _ in json.loads(text.splitlines()[-1])} == due


@pytest.mark.parametrize("two_hosts", [{"rate": ("500mbit", "50mbit")}], indirect=True, ids=["a tenth"])
def test_slow_link(two_hosts):
    """Two links carry a message together, each as much as it can: of a tenth of the speed, about a tenth."""
    text, _ = two_hosts.run("share", 8, 8)
    fast, slow = json.loads(text.splitlines()[-1])
    assert fast + slow > 64 << 20 and 0.005 * fast < slow < 0.3 * fast


@pytest.mark.parametrize("two_hosts", [{"rate": ("400mbit", "40mbit")}], indirect=True, ids=["a tenth"])
def test_slow_link_and_small_messages(two_hosts):
    """A link that has all of a message in its buffers before the first part arrives is known by the messages before."""
    text, _ = two_hosts.run("share", 1, 24)
    fast, slow = json.loads(text.splitlines()[-1])
    assert fast + slow > 24 << 20 and slow < 0.7 * fast  # 0.1 on an idle machine; half of the slots each would be 1


@pytest.mark.parametrize("two_hosts", [{"rate": ("400mbit", "40mbit")}], indirect=True, ids=["a tenth"])
def test_slow_link_that_is_tried_again(two_hosts):
    """A slow link gets a part from time to time, in case it has become faster, but not a part of each message from then on."""
    text, _ = two_hosts.run("share", 1, 260, 60)
    fast, slow = json.loads(text.splitlines()[-1])
    assert fast + slow > 199 << 20 and slow < 0.04 * fast, (fast, slow)


@pytest.mark.parametrize("two_hosts", [{"links": 4, "rate": "100mbit"}], indirect=True, ids=["four"])
def test_many_links_and_small_messages(two_hosts):
    """Messages of four slots go over four links of the same speed, not over the first two."""
    text, _ = two_hosts.run("share", 1, 80, 20)
    sent = json.loads(text.splitlines()[-1])
    assert sum(sent) > 59 << 20 and min(sent) > 0.1 * sum(sent), sent


@pytest.mark.parametrize("tls", ["0", "1"])
@pytest.mark.parametrize("two_hosts", [{"links": 2, "rate": "100mbit"}], indirect=True, ids=["slow"])
def test_messages_that_are_not_received_soon(two_hosts, tls):
    """They go from the sender's array at first, and are copied while parts are sent: the sender may change it then."""
    two_hosts.run("not_awaited", env={"XVCOMM_TLS": tls})


@pytest.mark.parametrize("threads", ["1", "3"])
def test_link_cut(two_hosts, threads):
    """A link is cut and comes back while messages are under way: nothing is lost."""
    two_hosts.cut_and_mend(env={"XVCOMM_WIRE_THREADS": threads})


def test_death(two_hosts):
    """The other host hears of a dead process, and its error names it."""
    first, _ = two_hosts.run("die")
    assert "rank 1 on b was lost" in first


def test_busy_at_the_first_connection(two_hosts):
    """A process that answers late is not lost, as long as its host answers."""
    two_hosts.run("busy", env={"XVCOMM_PEER_TIMEOUT": "0.5"})


def test_mismatch(two_hosts):
    """Both ends raise, with both descriptions."""
    for text in two_hosts.run("differ"):
        assert "rank 0 on a sent 4 x float32, tag 7; rank 1 on b expected 8 x int16, tag 7" in text


@pytest.mark.parametrize("two_hosts", [{"rate": "100mbit"}], indirect=True)
def test_deadline_in_a_large_message(two_hosts):
    """A message that is given up lets go of both arrays at once."""
    for text in two_hosts.run("give_up"):
        assert re.search("^True ", text, re.MULTILINE), (
            text
        )  # behind the report of the rank whose deadline is the first


def test_idle(two_hosts):
    """A rank that waits for nothing costs next to no CPU."""
    for text in two_hosts.run("idle"):
        assert float(text) < 0.25


def test_both_links_cut(two_hosts):
    """A host that cannot be reached is lost after XVCOMM_PEER_TIMEOUT."""
    ranks = two_hosts.begun(env={"XVCOMM_PEER_TIMEOUT": "1.5"})
    two_hosts.link(0, "down")
    two_hosts.link(1, "down")
    began = time.monotonic()
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert time.monotonic() - began < 40
    for text, _ in outputs:
        for link in range(2):
            assert re.search(rf"PeerLost: .*10.77.{link}.\d to 10.77.{link}.\d \(tcp\) lost [\d.]+ s ago", text), text
