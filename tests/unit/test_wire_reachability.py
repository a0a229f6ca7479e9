"""Which pairs of addresses are tried, in what order, and what is made of the results."""

import pytest

from xvcomm.backends.tcp.interfaces import Address, Place, routes
from xvcomm.types.route import MAX_RAILS, RDMA
from xvcomm.types.subnets import SubnetPort
from xvcomm.wire import reachability
from xvcomm.wire.reachability import Search, disjoint


def place(stack, *addresses):
    return Place(stack, [Address(*pair.split("="), 1000 + number) for number, pair in enumerate(addresses)], 999)


def pairs(found):
    return [route.ends[:2] for route in found]


TWO = place("a", "eth0=10.0.0.1/24", "eth1=10.0.1.1/24"), place("b", "eth0=10.0.0.2/24", "eth1=10.0.1.2/24")
STRAIGHT = [("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.1.2")]
FIRST, SECOND = (*STRAIGHT[0], 0), (*STRAIGHT[1], 0)
CROSSED = [("10.0.0.1", "10.0.1.2"), ("10.0.1.1", "10.0.0.2")]


@pytest.mark.parametrize(
    ("mine", "theirs", "due"),
    [
        (("e0=10.0.0.1/24", "e1=10.0.1.1/24"), ("x=10.0.1.2/24", "y=10.0.0.2/24"), [(0, 1), (1, 0)]),
        (("e0=10.0.0.1/24", "e1=10.0.1.1/24"), ("e0=10.8.0.1/24", "e1=10.9.0.1/24"), [(0, 0), (1, 1)]),
        (("e0=10.0.0.1/24", "e0=fd00::1/64"), ("e0=10.0.0.2/24", "e0=fd00::2/64"), [(0, 0)]),
        (("e0=10.0.0.1/24", "e0=fd00::1/64"), ("e0=10.9.0.2/24", "e0=fd00::2/64"), [(1, 1)]),
        (("e0=10.0.0.1/24", "e1=fd00::1/64"), ("e0=fd00::2/64",), [(1, 0)]),
        (("e0=10.0.0.1/24",), ("e0=fd00::2/64",), []),
        (("e0=10.0.0.1/24",), ("e0=10.0.0.2/24", "e1=10.0.0.3/24"), [(0, 0)]),
        (("e0=10.0.0.1/24", "e1=10.0.0.2/24"), ("e0=10.0.0.3/24", "e1=10.0.0.4/24"), [(0, 0), (1, 1)]),
    ],
    ids=["by network", "by order", "one card", "six by network", "six only", "none", "more there", "one network"],
)
def test_preferred(mine, theirs, due):
    """Networks decide, then the order of the interfaces, then IPv4; each interface is used once."""
    here, there = place("a", *mine), place("b", *theirs)
    found = disjoint(routes(here, there))
    assert pairs(found) == [(here.addresses[i].host, there.addresses[j].host) for i, j in due]
    assert [route.port for route in found] == [1000 + j for _, j in due]


def test_one_network_stack():
    assert pairs(routes(TWO[0], place("a", "eth0=10.0.0.2/24"))) == [("127.0.0.1", "127.0.0.1")]


def test_several_connections():
    """Each connection between two addresses is made on its own."""
    search = Search(routes(TWO[0], place("a", "eth0=10.0.0.2/24"), 3))
    first, second, third = search.begin([], 0.0)
    assert [route.number for route in (first, second, third)] == [0, 1, 2]
    search.end(second)
    search.end(third, "no answer")
    assert search.begin([second.ends], 0.0) == [third]
    assert search.blocked([second.ends]) == {}


def with_rdma(where, *hosts):
    return where.with_rdma(lambda host: host in hosts)


BOTH = with_rdma(TWO[0], "10.0.0.1", "10.0.1.1"), with_rdma(TWO[1], "10.0.0.2", "10.0.1.2")


def test_rdma_beside_one_connection():
    """Routes of RDMA are between addresses that both have it, behind all others."""
    found = routes(*BOTH, 4, 2)
    assert [(*route.ends[:2], route.port) for route in found if route.number < RDMA] == [
        (*pair, 1000 + (pair[1] == "10.0.1.2")) for pair in STRAIGHT + CROSSED
    ]
    assert [route.number for route in found[4:]] == [RDMA, RDMA + 1] * 4
    assert {route.ends for route in disjoint(found)} == {
        (*pair, number) for number in (0, RDMA, RDMA + 1) for pair in STRAIGHT
    }


def test_rdma_on_one_side_or_of_one_interface():
    """Without RDMA on both sides there are as many connections as ever."""
    assert routes(BOTH[0], TWO[1], 4, 2) == routes(*TWO, 4, 2)
    assert {route.number for route in routes(*TWO, 4, 2)} == {0, 1, 2, 3}
    found = routes(with_rdma(TWO[0], "10.0.1.1"), BOTH[1], 4, 2)
    assert [route.ends for route in disjoint(found)][2:] == [(*STRAIGHT[1], RDMA), (*STRAIGHT[1], RDMA + 1)]
    assert {route.number for route in found if route.local == "10.0.0.1"} == {0}


def test_no_rdma_on_one_network_stack():
    same = place("a", "eth0=10.0.0.2/24")
    assert all(route.number < RDMA for route in routes(BOTH[0], with_rdma(same, "10.0.0.2"), 2, 2))


@pytest.mark.parametrize(
    ("cards", "others", "pairs", "due"),
    [(1, 0, 2, 2), (4, 0, 8, 28), (8, 1, 2, 16), (20, 0, 2, 12), (1, 30, 8, 1), (1, 31, 2, 0)],
)
def test_rdma_stays_within_all_rails_of_a_link(cards, others, pairs, due):
    """Pairs of queues get fewer, and then not all interfaces have them."""

    def end(stack, last):
        names = [f"e{i}=10.0.{i}.{last}/24" for i in range(cards + others)]
        return with_rdma(place(stack, *names), *(f"10.0.{i}.{last}" for i in range(cards)))

    found = disjoint(routes(end("a", 1), end("b", 2), 12, pairs))
    assert sum(route.number >= RDMA for route in found) == due
    assert len(found) == cards + others + due <= MAX_RAILS


def with_ports(where, *gids):
    ports = [SubnetPort(f"mlx5_{number}:1", gid) for number, gid in enumerate(gids)]
    return where.with_rdma(lambda host: False, ports)


def between_ports(mine, theirs, pairs=1):
    return [route for route in routes(mine, theirs, 4, pairs) if route.via]


def test_ports_of_infiniband_are_joined_over_any_connection():
    """Behind all others, by number and GIDs; the preferred connections come first."""
    mine, theirs = with_ports(TWO[0], "fe80::1"), with_ports(TWO[1], "fe80::2")
    found = between_ports(mine, theirs, 2)
    assert found == routes(mine, theirs, 4, 2)[-8:]
    assert [route.via for route in found if route.number == RDMA] == STRAIGHT + CROSSED
    assert {route.ends for route in found} == {("fe80::1", "fe80::2", RDMA + number) for number in (0, 1)}
    assert {(route.hosts[1], route.port) for route in found} == {("10.0.0.2", 1000), ("10.0.1.2", 1001)}
    assert {route.number for route in routes(mine, theirs, 4, 2) if not route.via} == {0}
    assert str(found[0]) == "fe80::1 (mlx5_0:1) to fe80::2 (mlx5_0:1) over TCP from 10.0.0.1 to 10.0.0.2 port 1000"


def test_ports_of_one_subnet_come_first():
    """Then those in the same place; of different subnets those that would add one, over one connection."""
    mine, theirs = (
        with_ports(TWO[0], "fe80::1", "fd00::1", "fe80::3"),
        with_ports(TWO[1], "fd00::2", "fe80::2", "fc00::4"),
    )
    found = disjoint(between_ports(mine, theirs))
    assert pairs(found) == [("fe80::1", "fe80::2"), ("fd00::1", "fd00::2"), ("fe80::3", "fc00::4")]
    apart = [route for route in between_ports(mine, theirs) if route.remote == "fc00::4"]
    assert len(apart) == 3 and {route.via for route in apart} == {STRAIGHT[0]}


def test_ports_of_infiniband_on_one_side():
    """They are no reason to make fewer connections, nor where the other side has RDMA of Ethernet."""
    mine = with_ports(TWO[0], "fe80::1")
    assert routes(mine, TWO[1], 4, 2) == routes(*TWO, 4, 2)
    assert routes(mine, BOTH[1], 4, 2) == routes(*TWO, 4, 2)


def test_ports_count_as_rails_of_a_link():
    found = disjoint(
        routes(with_ports(TWO[0], *(f"fe80::{i}" for i in range(8))), with_ports(TWO[1], *("fe80::f1",) * 1), 4, 8)
    )
    assert sum(route.number >= RDMA for route in found) == 8 and len(found) <= MAX_RAILS


def test_ports_of_infiniband_say_nothing_of_hosts():
    """A host is tried over all its addresses, and blocked interfaces are told, without them."""
    mine, theirs = with_ports(TWO[0], "fe80::1"), with_ports(TWO[1], "fe80::2")
    search = Search(routes(mine, theirs))
    plain = [route for route in routes(mine, theirs) if not route.via]
    assert search.begin_all() == plain
    for route in plain[1:]:
        search.end(route, "refused", refused=True)
        assert not search.waited()
    search.end(plain[0], "refused", refused=True)
    assert search.waited() and search.ended()
    port = search.begin([], 5.0)[0]
    assert port.via and search.tries(port.ends)
    search.end(port, "they are in two subnets")
    assert set(search.blocked([])) == set(plain)
    assert search.fits(port, [FIRST, SECOND]) and not search.fits(port, [port.ends])


def test_at_most_all_rails_of_a_link():
    """However many threads there are, no more connections are looked for than a link has."""
    assert len(routes(TWO[0], place("a", "eth0=10.0.0.2/24"), 100)) == MAX_RAILS


def test_routes_do_not_wait_for_each_other():
    """A route that is being tried keeps nothing from the others but its interfaces."""
    search = Search(routes(*TWO))
    slow, quick = search.begin([], 0.5)
    search.end(quick, "reset")
    assert search.begin([], 0.5) == []  # it was tried just now
    assert search.begin([], 0.0) == [quick]
    assert search.tries(slow.ends) and search.tries(quick.ends)
    search.end(quick)
    assert not search.tries(quick.ends)
    assert search.begin([quick.ends], 0.0) == []


def test_routes_that_fail_in_turn_keep_no_other_waiting():
    """A route that was not tried gets its turn, also where those in its way do not end at the same time."""
    search = Search(routes(*TWO))
    first, second = search.begin([], 0.0)
    search.end(first, "no answer")
    assert search.begin([], 0.0) == [first]
    search.end(second, "no answer")
    assert search.begin([], 0.0) == []
    search.end(first, "no answer")
    crossed = search.begin([], 0.0)
    assert pairs(crossed) == CROSSED
    for route in crossed:
        search.end(route, "no answer")
    assert search.waited()


def test_every_pair_gets_its_turn():
    """Pairs that fail make way for those that were not tried, and come again after them."""
    search, seen = Search(routes(*TWO)), []
    for _ in range(3):
        found = search.begin([], 0.0)
        seen.append(pairs(found))
        for route in found:
            search.end(route, "no answer")
    assert seen == [STRAIGHT, CROSSED, STRAIGHT]
    assert search.waited() and not search.ended()


def test_a_refusal_is_not_the_end():
    """A process has ended when nobody listens where it did; before a connection has proved its addresses, at all of them."""
    search = Search(routes(*TWO))
    first, second = search.begin([], 0.0)
    search.end(first, "refused", refused=True)
    assert not search.ended() and not search.waited()
    search.end(second, "no answer")
    assert not search.ended()
    for route in search.begin([], 0.0):
        search.end(route, "refused", refused=True)
    assert search.ended()

    search.prove(SECOND)
    search.forget()
    first, second = search.begin([], 0.0)
    search.end(first, "refused", refused=True)
    search.end(second, "no answer")
    assert not search.ended() and search.waited()
    search.forget()
    first, second = search.begin([], 0.0)
    search.end(first, "no answer")
    assert not search.ended()
    search.end(second, "refused", refused=True)
    assert search.ended()


def test_blocked(monkeypatch):
    """Interfaces are blocked once every pair of those without a rail has failed, and a while after they had one."""
    search = Search(routes(*TWO))
    first, second = search.begin([], 0.0)
    search.end(first)
    search.prove(FIRST)
    assert search.blocked([FIRST]) == {}
    search.end(second, "no answer")
    assert search.blocked([FIRST]) == {second: "no answer"}
    search.end(second)
    search.prove(SECOND)
    assert search.blocked([FIRST, SECOND]) == {}
    search.lose(SECOND)
    search.end(second, "reset")
    assert search.blocked([FIRST]) == {}
    monkeypatch.setattr(reachability, "GRACE_SECONDS", -1.0)
    assert search.blocked([FIRST]) == {second: "reset"}


def test_no_routes():
    search = Search(())
    assert search.begin([], 0.0) == [] and search.waited() and not search.ended() and not search.blocked([])
