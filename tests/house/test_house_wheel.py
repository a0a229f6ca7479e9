"""What users install: the source archive, the wheel built from it, and the wheel in use in an empty folder."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

import pytest

import xvcomm

FOLDERS = {"xvcomm": "xvcomm", "backends": "xvcomm/backends", "adapters": "xvcomm/adapters"}

ALL_REDUCE = """
import numpy, xvcomm
with xvcomm.init() as comm:
    x = numpy.full(1000, comm.rank + 1.0, dtype="float32")
    comm.all_reduce(x)
    assert (x == 3.0).all(), x
    print("reduced by", comm.size, "islands", len(comm.topology.islands), xvcomm.__file__)
"""


def execute(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command; returns its output, or fails with it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """A new environment with the wheel, and an empty folder to work in."""

    bin: Path
    empty: Path

    def run(self, command: str, *arguments: str | Path) -> str:
        """Run a command of the environment from the empty folder."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return execute(self.bin / command, *arguments, cwd=self.empty, PATH=path, PYTHONPATH="")


@pytest.fixture(scope="module")
def dist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of the tree and the wheel built from that archive."""
    folder = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, which sees this one's other packages by a .pth file."""
    top = tmp_path_factory.mktemp("environment")
    (top / "empty").mkdir()
    execute(sys.executable, "-m", "venv", "--without-pip", top / "venv", cwd=top)
    python = top / "venv" / "bin" / "python"
    wheel = next(dist.glob("*.whl"))
    execute(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=top)
    folder = next((top / "venv" / "lib").glob("python*/site-packages"))
    (folder / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(python.parent, top / "empty")


@pytest.fixture(scope="module")
def expected(root: Path) -> set[str]:
    """Path in the wheel of every file of the package."""
    return {
        f"{target}/{file.relative_to(root / folder)}"
        for folder, target in FOLDERS.items()
        for file in (Path(top, name) for top, _, names in os.walk(root / folder) for name in names)
        if "__pycache__" not in file.parts and not file.is_symlink()
    }


def test_wheel_holds_the_package_and_nothing_else(dist: Path, expected: set[str]) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        links = [entry.filename for entry in wheel.infolist() if stat.S_ISLNK(entry.external_attr >> 16)]
    assert names == expected
    assert links == []
    assert "xvcomm/backends/host/__init__.py" in names


def test_wheel_contains_the_licence(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        licence = next(name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
        assert b"Apache License" in wheel.read(licence)


def test_description_has_no_link_that_leads_nowhere_on_pypi(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        file = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(wheel.read(file))
    text = metadata.get_payload(decode=True).decode()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "quick start (`docs/quickstart.md`)" in text
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []


def test_source_archive_holds_the_tree_without_links(dist: Path, root: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
    assert not any(m.issym() or m.islnk() for m in members.values())
    assert not any(name.startswith(("xvcomm/backends", "xvcomm/adapters")) for name in members)
    wanted = ("backends/__init__.py", "adapters/__init__.py", "tests/conftest.py", "Makefile", "constraints.txt")
    wanted += ("mkdocs.yml", "docs/tutorials/index.md", "SECURITY.md", "CITATION.cff")
    assert [name for name in wanted if name not in members] == []


def test_archives_are_fit_for_pypi(dist: Path) -> None:
    """As `make dist` checks them; `make test` has no twine."""
    pytest.importorskip("twine", reason="twine is not installed: pip install 'xvcomm[docs]'")
    text = execute(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    assert text.count("PASSED") == 2


def test_the_version_is_told_alike(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert version == xvcomm.__version__
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text()
    assert f" {version}" in (root / "CHANGELOG.md").read_text()


def test_import_from_an_empty_folder(installed: Installed) -> None:
    code = "import xvcomm, xvcomm.backends.host, xvcomm.adapters; print(xvcomm.backends.host.__file__)"
    where = installed.run("python", "-c", code).strip()
    assert Path(where).is_relative_to(installed.bin.parent)


def test_entry_points_lead_into_the_wheel(installed: Installed) -> None:
    code = """
from importlib.metadata import entry_points
for group in ("xvcomm.backends", "xvcomm.transports"):
    for point in entry_points(group=group):
        print(group, point.name, point.load().__name__)
"""
    lines = installed.run("python", "-c", code).splitlines()
    assert "xvcomm.backends host HostBackend" in lines
    assert "xvcomm.transports shm ShmTransport" in lines


def test_command_from_an_empty_folder(installed: Installed) -> None:
    text = installed.run("xvcomm", "--help")
    assert all(command in text for command in ("run", "doctor", "topo", "bench", "plan", "certify"))


def test_two_ranks_from_an_empty_folder(installed: Installed) -> None:
    (installed.empty / "job.py").write_text(ALL_REDUCE)
    text = installed.run("xvcomm", "run", "-n", "2", "--islands", "cuda:1,rocm:1", "--", "job.py")
    assert text.count("reduced by 2 islands 2") == 2
    assert str(installed.bin.parent) in text
