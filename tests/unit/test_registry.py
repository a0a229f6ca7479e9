"""Backends and transports come in by entry points; one that is broken takes nothing else down."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from xvcomm.backends.host import HostBackend
from xvcomm.backends.shm import ShmTransport
from xvcomm.engine.session import plugins as registry
from xvcomm.errors import BackendUnavailable


class Refusing(HostBackend):
    """A backend whose driver is missing."""

    kind = "refusing"

    def refusal(self) -> tuple[str, str] | None:
        return "no driver", "install the driver"


class Exploding(HostBackend):
    """A backend that cannot even be asked."""

    def refusal(self) -> tuple[str, str] | None:
        raise RuntimeError("symbol not found")


class RefusingTransport(ShmTransport):
    """A transport without its device."""

    @classmethod
    def refusal(cls) -> tuple[str, str] | None:
        return "no NIC", "plug one in"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and five of other people, of which one works."""
    module = ModuleType("other_people")
    module.__dict__.update({c.__name__: c for c in (Refusing, Exploding, RefusingTransport, HostBackend)})
    monkeypatch.setitem(sys.modules, "other_people", module)
    points = {
        registry.BACKENDS: [
            ("refusing", "other_people:Refusing"), ("absent", "no_such_module:Backend"),
            ("exploding", "other_people:Exploding"), ("missing", "other_people:Missing"),
            ("zeta", "other_people:HostBackend"), ("host", "xvcomm.backends.host:HostBackend"),
        ],
        registry.TRANSPORTS: [("nic", "other_people:RefusingTransport"), ("shm", "xvcomm.backends.shm:ShmTransport")],
    }  # fmt: skip
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group, **by: EntryPoints(EntryPoint(name, value, group) for name, value in points[group]).select(**by),
    )


def test_ours_come_by_the_same_door() -> None:
    assert {(f.name, f.usable) for f in registry.backends()} >= {("host", True)}
    assert {(f.name, f.usable) for f in registry.transports()} >= {("shm", True)}
    found = next(f for f in registry.backends() if f.name == "host")
    assert found.load() is HostBackend
    assert isinstance(registry.backend("host"), HostBackend)


def test_usable_ones_come_first(plugins: None) -> None:
    found = registry.backends()
    assert [f.name for f in found] == ["host", "zeta", "absent", "exploding", "missing", "refusing"]
    assert [f.usable for f in found] == [True, True, False, False, False, False]
    assert [(f.name, f.usable) for f in registry.transports()] == [("shm", True), ("nic", False)]


def test_refusals_carry_a_remedy(plugins: None) -> None:
    found = {f.name: f for f in (*registry.backends(), *registry.transports())}
    assert (found["refusing"].reason, found["refusing"].remedy) == ("no driver", "install the driver")
    assert (found["nic"].reason, found["nic"].remedy) == ("no NIC", "plug one in")
    assert found["absent"].reason.startswith("ModuleNotFoundError: ")
    assert found["exploding"].reason == "RuntimeError: symbol not found"
    assert "reinstall" in found["missing"].remedy
    assert found["host"].reason == found["host"].remedy == ""


@pytest.mark.parametrize("kind", ["refusing", "absent", "nothing of this name"])
def test_asking_for_what_does_not_work(plugins: None, kind: str) -> None:
    with pytest.raises(BackendUnavailable) as refused:
        registry.backend(kind)
    text = str(refused.value)
    assert f"no backend for device {kind!r}" in text
    assert "host: works" in text
    assert "refusing: no driver; install the driver" in text


def test_asking_for_one_loads_no_other(plugins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on host memory need not load what GPUs need, nor let a driver look for them."""
    asked: list[str] = []
    examine = registry._examine
    monkeypatch.setattr(registry, "_examine", lambda point: asked.append(point.name) or examine(point))
    assert isinstance(registry.backend("zeta"), HostBackend)
    assert asked == ["zeta"]
