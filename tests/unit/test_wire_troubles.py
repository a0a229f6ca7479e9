"""How long a rail of RDMA is left alone that fails again and again, and what is said of it."""

from types import SimpleNamespace

import pytest

from xvcomm.wire import troubles
from xvcomm.wire.wires import Need

ENDS = ("10.0.0.1", "10.0.0.2", 1000)


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the host was booted, in a list."""
    now = [0.0]
    monkeypatch.setattr(troubles, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def some(clock):
    """Those of a link whose rings do not need RDMA."""
    return troubles.Troubles(SimpleNamespace(need_of_rdma=lambda link: Need.NOTHING), 0, 10.0)


@pytest.mark.parametrize("uptime", [1.0, 30.0, 1e6])
def test_a_rail_that_flaps_is_tried_less_and_less_often(some, clock, uptime):
    """Also on a host that was booted a moment ago."""
    clock[0] = uptime
    pauses = []
    for _ in range(9):
        some.fail(ENDS, "RETRY_EXC_ERR")
        pauses.append(some.pause(ENDS))
        clock[0] += pauses[-1] + 0.1
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    clock[0] += 1000
    some.fail(ENDS, "RETRY_EXC_ERR")
    assert some.pause(ENDS) == 0.5


def test_what_is_said_of_them(some):
    """How the last rail failed, and what has kept a new one from coming up since, the newest last."""
    assert some.text == ""
    some.note_route("no route to host")
    some.note_route("timed out")
    assert some.text == "no route to host"
    some.fail(ENDS, "mlx5_0 port 1, GID 10.0.0.1 to 10.0.0.2: PORT_ERR")
    some.note_route("timed out")
    assert some.text == "mlx5_0 port 1, GID 10.0.0.1 to 10.0.0.2: PORT_ERR"
    some.note("no active port")
    some.note("no memory")
    assert some.text == "mlx5_0 port 1, GID 10.0.0.1 to 10.0.0.2: PORT_ERR; then no memory"


def test_a_consequence_does_not_hide_its_cause(some, clock):
    """Unless what failed before was long ago."""
    some.fail(ENDS, "PORT_ERR")
    some.note("no active port")
    some.fail(ENDS, "WR_FLUSH_ERR", follows=True)
    some.explain("GID_CHANGE")
    assert some.text == "PORT_ERR; then no active port"
    clock[0] += 11
    some.fail(ENDS, "WR_FLUSH_ERR", follows=True)
    assert some.text == "WR_FLUSH_ERR"
    some.explain("GID_CHANGE")
    some.explain("PORT_ERR")
    assert some.text == "GID_CHANGE"
