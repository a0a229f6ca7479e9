"""Shared by all tests: where the tree lies, and a check after every test that nothing was left behind.

A test leaks if, two seconds after its end, there is more than before it of:

* files `xvcomm-*` in /dev/shm that no living process maps: ranks of a fixture may have opened a ring at one end. Other jobs'
  files are not among them: each test process has a /dev/shm of its own where it may mount one, as root may; elsewhere only
  files are counted whose names tell that this run made them.
* processes: descendants of this one, and those started by them that lost their parent (known by a variable of the
  environment). A process that ended but was never waited for counts. Python's own helpers, which live as long as the
  interpreter, do not.
* sockets of this process, after a garbage collection: an object in a reference cycle is not a leak. Those to ranks that tests
  share are left out: after a failure the next test starts the ranks again.

What fixtures of a wider scope own exists before the test and is not counted; the check at the end of the session counts
their files and processes. Leaked processes are killed, so that the next test runs on a quiet machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

SHM = Path("/dev/shm")
GRACE_SECONDS = 2.0
MARK = "LEAK_CHECK_OF"
KERNEL = 2  # the parent of the kernel's threads
# Jobs of this run have it in the names of their files, but those that tests start without any XVCOMM_ variable.
OURS = f"test{os.getpid()}"
os.environ["XVCOMM_JOB"] = OURS
# Threads of torch and numpy that share cores with other tests mostly spin until the others have come.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _mount_own_shm() -> bool:
    """Mount a private /dev/shm for this process and its children; False without the permission."""
    libc = ctypes.CDLL(None)
    new_mounts, private, recursive, nosuid_nodev = 0x20000, 1 << 18, 1 << 14, 2 | 4
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, private | recursive, None):
        return False
    return bool(libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", nosuid_nodev, b"mode=1777") == 0)


ALONE = _mount_own_shm()
# Python ignores interrupts when a shell starts it in the background, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


@dataclass(frozen=True)
class Belongings:
    """Resources of this test run at one moment."""

    shm: frozenset[str]
    processes: frozenset[int]
    sockets: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(_shm_files(), _processes(), _sockets())

    def since(self, before: Belongings) -> Belongings:
        return Belongings(self.shm - before.shm, self.processes - before.processes, self.sockets - before.sockets)

    def __bool__(self) -> bool:
        return bool(self.shm or self.processes or self.sockets)

    def __str__(self) -> str:
        lines = [f"/dev/shm/{name}" for name in sorted(self.shm)]
        lines += [f"process {pid}: {_command(pid)}" for pid in sorted(self.processes)]
        lines += [f"{name} of this process" for name in sorted(self.sockets)]
        return "\n".join(lines)


TOGETHER = ("tests/adapters/jax", "tests/adapters/torch")
"""Folders whose files share ranks: one process runs them all, so that these ranks start once."""

SLOWEST = (
    "tests/adapters/torch", "tests/adapters/jax", "tests/conformance/test_rocm.py", "tests/conformance/test_certify.py",
    "xvcomm/testing/test_collectives.py", "tests/adapters/torch_suite/test_torch_suite.py",
    "tests/hosts/test_hosts_faults.py", "tests/conformance/test_train.py", "tests/hosts/test_hosts_starts.py",
    "tests/hosts/test_hosts_networks.py", "tests/conformance/test_benchmark_paper.py", "xvcomm/testing/test_adapter.py",
    "xvcomm/testing/test_pointtopoint.py", "tests/conformance/test_rounding.py", "tests/unit/test_llama_stages.py",
    "tests/unit/test_schedule_collectives.py",
)  # fmt: skip
"""What begins first, so that none of it is left to one process at the end: by CPU time, see CONTRIBUTING.md."""


WAITING = "tests/faults/"
"""Whose tests mostly wait: one of these portions after each other one, so that the cores have time for both."""

SPREAD = "tests/faults/test_faults_campaign.py"
"""A long file whose tests share nothing."""


def _portion(nodeid: str) -> str:
    """What one process runs in whole: a folder of `TOGETHER`, a test of `SPREAD`, or a file."""
    file = nodeid.partition("::")[0]
    if file == SPREAD:
        return nodeid
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file


_IMPORTED = (
    "xvcomm.comm.communicator", "xvcomm.comm.init", "xvcomm.backends.host.collective", "xvcomm.backends.host.device",
    "xvcomm.backends.shm", "xvcomm.backends.tcp", "xvcomm.wire.network", "xvcomm.cli.run", "xvcomm.cli.bench.command",
    "xvcomm.cli.certify.command", "xvcomm.testing.common_reducers", "xvcomm.testing.world", "typer.rich_utils",
    "typer._adapters", "matplotlib.backends.backend_agg", "pytest", "torch._dynamo", "torch.distributed.run",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.nn.parallel", "torch.optim", "torch.utils.data",
)  # fmt: skip
"""What programs of the fixture `python` have imported, as far as it is installed."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace xdist's choice by files with one by portions."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Portions(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _portion(nodeid)

    return Portions(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is collected out of all garbage collections: they would look at torch's and JAX's modules each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the slowest portions begin first, and those that mostly wait in turn with the others."""
    slowest = {name: place for place, name in enumerate(SLOWEST)}
    portions = sorted({_portion(item.nodeid): None for item in items}, key=lambda name: slowest.get(name, len(slowest)))
    waiting = [name for name in portions if name.startswith(WAITING)]
    waiting.sort(key=lambda name: name.startswith(SPREAD))  # last: parts of a few seconds end together
    in_turn = zip_longest([name for name in portions if not name.startswith(WAITING)], waiting)
    places = {name: place for place, name in enumerate(chain.from_iterable(in_turn))}
    items.sort(key=lambda item: places[_portion(item.nodeid)])


@pytest.fixture(scope="session")
def root() -> Path:
    """Root folder of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def rocm_path(root: Path) -> Path:
    """Compiled ROCm libraries for host memory from tests/shims/hip, with the kernels for them in xvcomm's cache."""
    builder = runpy.run_path(str(root / "tests" / "shims" / "hip" / "build.py"))
    try:
        found: Path = builder["build"]()
    except builder["NoCompiler"] as missing:
        pytest.skip(str(missing))
    if importlib.util.find_spec("rocm"):
        # On a busy machine compiling takes longer than ranks wait for each other.
        variables = os.environ | {"ROCM_PATH": str(found), "XVCOMM_DEVICE": "rocm", "XVCOMM_TIMEOUT": "250"}
        subprocess.run([sys.executable, "-c", "import xvcomm; xvcomm.init().close()"], env=variables, check=True)
    return found


@contextlib.contextmanager
def _forks(folder: Path, modules: Iterable[str]) -> Iterator[str]:
    """The path of an interpreter whose programs are forks of a process that has imported these modules."""
    here, client, address = Path(__file__).parent / "forks", folder / "python", folder / "socket"
    command = shlex.join([sys.executable, "-IS", f"{here}/client.py", f"{address}", f"{client}", sys.executable])
    client.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    client.chmod(0o755)
    installed = [module for module in modules if importlib.util.find_spec(module.partition(".")[0])]
    start = [sys.executable, f"{here}/server.py", f"{address}", *installed]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield str(client)
        finally:
            server.stdin.close()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An interpreter, also as $TEST_PYTHON, whose programs find xvcomm and torch imported, so that a start costs little.

    Programs are to see no variables in what is imported, such as XVCOMM_REPLACE in torch, and to need no process group with what
    starts them.
    """
    with _forks(tmp_path_factory.mktemp("python"), _IMPORTED) as path:
        os.environ["TEST_PYTHON"] = path
        yield path
        del os.environ["TEST_PYTHON"]


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_session() -> Iterator[None]:
    """Mark the processes of this run, and check files and processes at its end."""
    os.environ[MARK] = str(os.getpid())
    before = Belongings.now()
    yield
    _fail_on(_left(lambda: Belongings(_shm_files(), _processes(), before.sockets).since(before)), "the session")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Check that the test released every shared memory file, process and socket."""
    before = Belongings.now()
    yield
    _fail_on(_left(lambda: Belongings.now().since(before)), "the test")


def _left(new: Callable[[], Belongings]) -> Belongings:
    deadline = time.monotonic() + GRACE_SECONDS
    left = new()
    if left:
        gc.collect()
        multiprocessing.active_children()  # joins those that ended
        left = _unmapped(new())
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _unmapped(new())
    return left


def _unmapped(left: Belongings) -> Belongings:
    """Without the files that ranks of a fixture map, where no process is left that could be the one that maps them."""
    if not left.shm or left.processes:
        return left
    return Belongings(left.shm - _mapped(), left.processes, left.sockets)


def _fail_on(left: Belongings, who: str) -> None:
    if not left:
        return
    text = str(left)
    for pid in left.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pytest.fail(f"left behind by {who}:\n{text}", pytrace=False)


def _shm_files() -> frozenset[str]:
    return frozenset(name for name in os.listdir(SHM) if name.startswith("xvcomm-" if ALONE else f"xvcomm-{OURS}-"))


def _sockets() -> frozenset[str]:
    processes = sys.modules.get("xvcomm.testing.processes")
    found, of_ranks = set(), processes.descriptors_in_use() if processes is not None else set()
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - of_ranks:
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:"):
                found.add(link)
    return frozenset(found)


def _processes() -> frozenset[int]:
    """Processes of this run other than itself and Python's helpers."""
    mine = os.getpid()
    mark = f"{MARK}={mine}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    unknown: set[int] = set()
    with os.scandir("/proc") as entries:
        looked_at = [place for entry in entries if (place := (entry.name, entry.inode())) not in _others]
    for name, _ in looked_at:
        with contextlib.suppress(OSError, ValueError):
            parents[int(name)] = int(_read(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
            environ = _read(f"/proc/{name}/environ")
            if mark in environ.split(b"\0"):
                marked.add(int(name))
            elif not environ and parents[int(name)] != KERNEL:
                unknown.add(int(name))  # it has none for the moment in which it begins a program
    found = {pid for pid in parents if pid in marked or _descends(pid, mine, parents)}
    _others.update(
        place for place in looked_at if not place[0].isdigit() or int(place[0]) in parents.keys() - found - unknown
    )
    return frozenset(pid for pid in found - {mine} if not any(helper in _command(pid).encode() for helper in HELPERS))


_others: set[tuple[str, int]] = set()
"""What else is in /proc, by name and inode: it never becomes a process of this run, and is not looked at again."""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "(ended, not waited for)"


def _mapped() -> frozenset[str]:
    """Names in /dev/shm that other living processes map."""
    names: set[str] = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid != os.getpid():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                names |= {line.rpartition("/")[2] for line in maps.splitlines() if f" {SHM}/xvcomm-" in line}
    return frozenset(names)
