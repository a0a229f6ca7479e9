"""The two hosts themselves, where they are built: NICs, exit status, output, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RXE = Path(__file__).resolve().parents[1] / "shims" / "rxe"


def load(name: str) -> ModuleType:
    """A module of the shim; `hosts` imports `build` by its bare name."""
    found = importlib.util.spec_from_file_location(name, RXE / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that starts a command on two hosts."""
    for name in ("build", "hosts"):  # restored afterwards, as they were
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    built = load("build").kept()
    if built is None:
        pytest.skip("the hosts are not built here: make test-rdma")
    hosts = load("hosts")
    yield lambda *command, **options: hosts.Hosts(built, command, **options)


def test_worst_exit_status_and_output(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start("sh", "-c", "cat /sys/class/infiniband/rxe1/ports/1/state; exit $((HOST_INDEX * 3))") as hosts:
        assert hosts.wait(120) == 3
    printed = capfd.readouterr().out
    assert "host 0| 4: ACTIVE" in printed
    assert "host 1| 4: ACTIVE" in printed


def test_time_limit(start: Any) -> None:
    with start("sleep", "1000") as hosts:
        begun = time.monotonic()
        assert hosts.wait(4) == 124
        assert time.monotonic() - begun < 60


def test_writable_folders_keep_what_is_written(start: Any, tmp_path: Path) -> None:
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    kept.mkdir()
    lost.mkdir()
    with start("sh", "-c", f"touch {kept}/$HOST_INDEX {lost}/$HOST_INDEX", writable=[kept]) as hosts:
        assert hosts.wait(120) == 0
    assert sorted(file.name for file in kept.iterdir()) == ["0", "1"]
    assert not list(lost.iterdir())


def test_a_host_that_does_not_boot(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start("true", writable=[Path("/dev/null/none")]) as hosts:
        assert hosts.wait(120) == 125
    assert "fail cannot mount /dev/null/none" in capfd.readouterr().err


def test_where_they_cannot_be_built_it_says_why(tmp_path: Path) -> None:
    command = [sys.executable, str(RXE / "run.py"), "--", "false"]
    variables = {"PATH": str(tmp_path), "RXE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: no hosts with RDMA NICs: the hosts are built from Debian's packages")
