"""The paths of a link: what is told of them, and how a wire counts what each has carried."""

import ctypes
from types import SimpleNamespace

import pytest

from xvcomm.abc.transport import Path
from xvcomm.jit.compile import kernel
from xvcomm.memory.ring import LEDGER
from xvcomm.wire import paths
from xvcomm.wire.paths import Paths
from xvcomm.wire.records import PARTS, Rail, Wire, rail_at, wire_at
from xvcomm.wire.shares import Shares, count_slot

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def now(monkeypatch):
    """The time, as the only entry of a list."""
    now = [100.0]
    monkeypatch.setattr(paths, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def record(sent, received, repeated=0):
    return SimpleNamespace(sent=sent, received=received, repeated=repeated)


def test_paths_between_the_same_addresses_have_one_route():
    known = Paths()
    numbers = [known.use("tcp", (HERE, there, number)) for there in (THERE, "10.0.1.2") for number in range(2)]
    assert list(map(known.route, numbers)) == [numbers[0], numbers[0], numbers[2], numbers[2]]


def test_states(now):
    """A path is up, silent or lost; bytes of all its rails count."""
    known = Paths()
    assert known.told({}) == "there was no connection to it"
    first, second = (known.use("tcp", (HERE, THERE, number)) for number in range(2))
    assert known.use("tcp", (HERE, THERE, 0)) == first != second
    old, new = record(10, 19, 2), record(3, 4)
    known.begin(first, old)
    known.begin(second, new)
    now[0], old.received = 100.2, 20
    known.look()
    now[0] = 104.2
    one, other = known.told({second: 101.5}).split("; ")
    assert one == f"{HERE} to {THERE} (tcp) up, nothing heard for 4.0 s, 10 bytes sent, 20 received"
    silent = "up, nothing heard for 4.2 s, nothing acknowledged for 2.7 s"
    assert other == f"{HERE} to {THERE} (tcp 1) {silent}, 3 bytes sent, 4 received"
    new.received = 5
    assert known.told({}).endswith(f"{HERE} to {THERE} (tcp 1) up, 3 bytes sent, 5 received")
    known.end(first, old)
    now[0] = 106.5
    assert known.told({}).startswith(f"{HERE} to {THERE} (tcp) lost 2.3 s ago, 10 bytes sent, 20 received; ")
    assert [(path.number, path.up, path.sent, path.losses) for path in known.read(7)] == [
        (0, False, 10, 1),
        (1, True, 3, 0),
    ]
    known.begin(known.use("tcp", (HERE, THERE, 0)), record(1, 1, 5))
    assert known.read(7)[0] == Path(7, "tcp", HERE, THERE, 0, up=True, sent=11, received=21, losses=1, retries=7)
    assert known.told({}).startswith(f"{HERE} to {THERE} (tcp) up, 11 bytes sent, 21 received; ")


def test_replaced(now):
    """A rail may be replaced before its loss is noticed."""
    known, old = Paths(), record(10, 20)
    number = known.use("tcp", (HERE, THERE, 0))
    known.begin(number, old)
    known.begin(number, record(1, 2))
    known.end(number, old)
    assert known.told({}) == f"{HERE} to {THERE} (tcp) up, 11 bytes sent, 22 received"


def test_many(now):
    """A link with very many paths is told in short."""
    known = Paths()
    for number in range(11):
        known.begin(known.use("rdma", (HERE, THERE, 1000 + number)), record(0, 0))
    *told, last = known.told({}).split("; ")
    assert len(told) == 8 and told[0].startswith(f"{HERE} to {THERE} (rdma) up") and last == "and 3 more"


def _count(wire, rail, message, nbytes):
    count_slot(wire_at(wire), rail_at(rail), message, nbytes)
    return 0


def test_counts():
    """Of each of the newest messages a wire counts by path; what too many paths carry is in the sum nevertheless."""
    count, shares, rail = kernel("int64(int64, int64, int64, int64)")(_count), Shares(), Rail()
    wire = Wire(shares=shares.address)

    def carry(path, message, nbytes):
        rail.path = path
        count(*(ctypes.addressof(each) for each in (wire, rail)), message, nbytes)

    for path, nbytes in ((1, 5), (2, 7), (1, 100)):
        carry(path, 1, nbytes)
    assert shares.read() == {1: [(1, 105), (2, 7)]}
    assert {type(number) for part in shares.read()[1] for number in part} == {int}  # as msgspec demands
    for path in range(1, PARTS + 3):
        carry(path, 2, 10)
    assert [nbytes for _, nbytes in shares.read()[2]] == [10] * (PARTS - 1) + [30]
    carry(3, 1 + LEDGER, 9)
    assert shares.read().keys() == {2, 1 + LEDGER} and shares.read()[1 + LEDGER] == [(3, 9)]
