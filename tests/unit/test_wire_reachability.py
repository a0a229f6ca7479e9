"""Which pairs of addresses are tried, in what order, and what is made of the results."""

import pytest

from xvcomm.backends.tcp.interfaces import Address, Place, routes
from xvcomm.types.route import MAX_RAILS
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
