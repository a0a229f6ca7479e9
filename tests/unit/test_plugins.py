"""Backends and transports are loaded by entry points; a broken one does not affect the others."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest

from xvcomm.backends.host import HostBackend
from xvcomm.backends.shm import ShmTransport
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import BackendUnavailable


class Refusing(HostBackend):
    """A backend whose driver is missing."""

    kind = "refusing"

    def refusal(self) -> tuple[str, str] | None:
        return "no driver", "install the driver"


class Exploding(HostBackend):
    """A backend that raises when queried."""

    def refusal(self) -> tuple[str, str] | None:
        raise RuntimeError("symbol not found")


class RefusingTransport(ShmTransport):
    """A transport without its device."""

    @classmethod
    def refusal(cls) -> tuple[str, str] | None:
        return "no NIC", "plug one in"


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in backends and five external ones, one of which works."""
    module = ModuleType("other_people")
    module.__dict__.update({c.__name__: c for c in (Refusing, Exploding, RefusingTransport, HostBackend)})
    monkeypatch.setitem(sys.modules, "other_people", module)
    points = {
        plugins.BACKENDS: [
            ("refusing", "other_people:Refusing"), ("absent", "no_such_module:Backend"),
            ("exploding", "other_people:Exploding"), ("missing", "other_people:Missing"),
            ("zeta", "other_people:HostBackend"), ("host", "xvcomm.backends.host:HostBackend"),
        ],
        plugins.TRANSPORTS: [("nic", "other_people:RefusingTransport"), ("shm", "xvcomm.backends.shm:ShmTransport")],
    }  # fmt: skip
    monkeypatch.setattr(plugins, "BUILT_IN", EntryPoints())
    monkeypatch.setattr(
        plugins,
        "installed",
        lambda group: EntryPoints(EntryPoint(name, value, group) for name, value in points[group]),
    )


def test_ours_are_found_without_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a source tree on PYTHONPATH."""
    monkeypatch.setattr(plugins, "installed", lambda _: EntryPoints())
    assert {f.name for f in plugins.backends()} == {"cuda", "rocm", "host"}
    assert isinstance(plugins.backend("host"), HostBackend)
    assert [f.name for f in plugins.transports()] == ["shm", "tcp"]


def test_the_built_in_ones_are_those_that_are_installed(root: Path) -> None:
    """`pyproject.toml` names them for the metadata, `plugins` where there is none."""
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    groups = (plugins.BACKENDS, plugins.TRANSPORTS, plugins.CARDS)
    named = {(group, name): points[group][name] for group in groups for name in points[group]}
    assert named == {(point.group, point.name): point.value for point in plugins.BUILT_IN}


def test_own_plugins_use_entry_points() -> None:
    assert {(f.name, f.usable) for f in plugins.backends()} >= {("host", True)}
    assert {(f.name, f.usable) for f in plugins.transports()} >= {("shm", True)}
    found = next(f for f in plugins.backends() if f.name == "host")
    assert found.load() is HostBackend
    assert isinstance(plugins.backend("host"), HostBackend)


def test_the_import_path_is_looked_at_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed meanwhile in another folder has its plug-ins."""
    metadata = tmp_path / "late-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[xvcomm.backends]\nlate = no_such_module:Backend\n")
    assert "late" not in plugins.installed(plugins.BACKENDS).names
    monkeypatch.syspath_prepend(tmp_path)
    assert "late" in plugins.installed(plugins.BACKENDS).names


def test_usable_ones_come_first(others: None) -> None:
    found = plugins.backends()
    assert [f.name for f in found] == ["host", "zeta", "absent", "exploding", "missing", "refusing"]
    assert [f.usable for f in found] == [True, True, False, False, False, False]
    assert [(f.name, f.usable) for f in plugins.transports()] == [("shm", True), ("nic", False)]


def test_refusals_carry_a_remedy(others: None) -> None:
    found = {f.name: f for f in (*plugins.backends(), *plugins.transports())}
    assert (found["refusing"].reason, found["refusing"].remedy) == ("no driver", "install the driver")
    assert (found["nic"].reason, found["nic"].remedy) == ("no NIC", "plug one in")
    assert found["absent"].reason.startswith("ModuleNotFoundError: ")
    assert found["exploding"].reason == "RuntimeError: symbol not found"
    assert "reinstall" in found["missing"].remedy
    assert found["host"].reason == found["host"].remedy == ""


@pytest.mark.parametrize("broken", [False, True])
def test_devices_of_rdma_are_of_the_first_that_has_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    def opens(config: Config, interfaces: dict[str, str], device: None) -> object:
        return (config, interfaces)

    def fails(config: Config, interfaces: dict[str, str], device: None) -> None:
        raise RuntimeError("symbol not found")

    module = ModuleType("other_people")
    module.__dict__.update(opens=opens, none=lambda *_: None, fails=fails)
    monkeypatch.setitem(sys.modules, "other_people", module)
    names = ["fails"] if broken else ["none", "opens"]
    points = EntryPoints(EntryPoint(name, f"other_people:{name}", plugins.CARDS) for name in names)
    monkeypatch.setattr(plugins, "BUILT_IN", EntryPoints())
    monkeypatch.setattr(plugins, "installed", lambda group: points.select(group=group))
    monkeypatch.setattr("xvcomm.system.notice.speaks", lambda: True)
    config, interfaces = Config(), {"10.0.0.1": "eth0"}
    assert plugins.cards(config, interfaces) == (None if broken else (config, interfaces))
    assert [record.getMessage() for record in caplog.records] == (
        ["xvcomm: no RDMA by other_people:fails: RuntimeError: symbol not found"] if broken else []
    )


@pytest.mark.parametrize("kind", ["refusing", "absent", "nothing of this name"])
def test_requesting_an_unusable_backend(others: None, kind: str) -> None:
    with pytest.raises(BackendUnavailable) as refused:
        plugins.backend(kind)
    text = str(refused.value)
    assert f"no backend for device {kind!r}" in text
    assert "host: works" in text
    assert "refusing: no driver; install the driver" in text


def test_requesting_one_backend_loads_no_other(others: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on host memory need not load what GPUs need, nor let a driver look for them."""
    asked: list[str] = []
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda point: asked.append(point.name) or load(point))
    assert isinstance(plugins.backend("zeta"), HostBackend)
    assert set(asked) == {"zeta"}
