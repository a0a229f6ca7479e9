"""`xvcomm explain`, SIGUSR1 and dumps: a job that hangs or has ended is explained without the help of its Python."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from xvcomm.cli.last_dumps import LastDumps
from xvcomm.system.processes import halted
from xvcomm.testing import World
from xvcomm.trace.snapshot import SUFFIX, Snapshot, load_folder
from xvcomm.types.opcode import OpCode

pytestmark = pytest.mark.usefixtures("python")

HANG = """
import ctypes, os, signal, sys, time
import numpy as np, xvcomm
def holds_the_interpreter_lock():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # the second time for good; signals do not end it
comm = xvcomm.init()
x, y = np.ones(16, np.float32), np.ones(1 << 18)
comm.sendrecv(y, comm.rank ^ 1, np.empty_like(y), comm.rank ^ 1)
comm.barrier()
print(f"rank {comm.rank} is process {os.getpid()}", flush=True)
if comm.rank == 2:
    holds_the_interpreter_lock()
if comm.rank == 3:
    time.sleep(1)  # what it has sent must be out: its threads stop, too
    os.kill(os.getpid(), signal.SIGSTOP)
comm.all_reduce(x)
"""
STOPS = """
import os, signal, xvcomm
comm = xvcomm.init()
comm.barrier()
print(f"rank {comm.rank} is process {os.getpid()}", flush=True)
if comm.rank < 3:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
"""
LOCKED = """
import ctypes, os, sys, threading, time
import numpy as np, xvcomm
comm = xvcomm.init()
comm.barrier()
def block():
    while comm.rank < 2 and len(comm.history()) < 2:
        time.sleep(0.05)
    print(f"rank {comm.rank} blocks", flush=True)
    sys.setswitchinterval(100)
    ctypes.PyDLL(None).pause()  # with the interpreter's lock
print(f"rank {comm.rank} is process {os.getpid()}", flush=True)
threading.Thread(target=block, daemon=True).start()
if comm.rank < 2:
    comm.recv(np.ones(3), 2 + comm.rank)
time.sleep(100)
"""
END = """
import numpy as np, xvcomm
comm = xvcomm.init()
comm.barrier()
if comm.rank == 1:
    END
comm.all_reduce(np.ones(16))
"""
BOTH_DIE = """
import ctypes, os, sys, time
import numpy as np, xvcomm
comm = xvcomm.init()
pids = comm.all_gather_object(os.getpid())
if comm.rank < 2:
    time.sleep(100)
libc = ctypes.PyDLL(None)
sys.setswitchinterval(100)
libc.kill(pids[0], 9), libc.kill(pids[1], 9), libc.usleep(300_000)
sys.setswitchinterval(0.005)
comm.all_reduce(np.ones(16))
"""
SOME_DIE = """
import os, time
import numpy as np, xvcomm
from xvcomm.testing.inside import context
comm = xvcomm.init()
if comm.rank == 1:
    while not context(comm).session.journal.clock():
        time.sleep(0.05)
comm.barrier()
if comm.rank in DIE:
    os.kill(os.getpid(), 9)
comm.all_reduce(np.ones(16))
"""
SHIFT = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && clock == CLOCK_REALTIME)
        now->tv_sec += 100;
    return status;
}
"""
TERMINATED = """
import os, signal, sys, threading, time
import numpy as np, xvcomm
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
comm = xvcomm.init()
comm.barrier()
def end():
    while len(comm.history()) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end).start()
comm.recv(np.ones(3), 1 - comm.rank)
"""


class Hang:
    """A job whose ranks hang, and what it has written.

    Attributes:
        host: the name of one of its hosts, which no other job has; empty if they have no names of their own.
        pids: its processes, by rank.
    """

    def __init__(
        self, folder: Path, hosts: str, program: str = HANG, stopped: Sequence[int] = (3,), dumps: Path | None = None
    ) -> None:
        script, self._out, tag = folder / "hang.py", folder / "out", secrets.token_hex(3)
        self.host = tag + hosts[-1] if hosts else ""
        labels = "import os; os.environ['XVCOMM_HOST'] = os.environ['HOSTS'].split()[int(os.environ['RANK'])]\n"
        script.write_text((labels if hosts else "") + program)
        run = os.environ["TEST_PYTHON"], "-m", "xvcomm", "run", "-n", str(len(hosts) or 4)
        # Real processes: the launcher knows its ranks by the process groups that it has made.
        command = [*run, sys.executable, str(script)]
        self._process = subprocess.Popen(
            command,
            stdout=self._out.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"HOSTS": " ".join(tag + host for host in hosts), "XVCOMM_PEER_TIMEOUT": "600"}
            | ({"XVCOMM_TRACE_DIR": str(dumps)} if dumps else {}),
        )
        self.pids: dict[int, int] = {}
        self._until(lambda: len(self._started()) == (len(hosts) or 4))
        self.pids = self._started()
        for rank in stopped:
            self._until(lambda pid=self.pids[rank]: halted(pid))
        time.sleep(0.5)

    def _started(self) -> dict[int, int]:
        return {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is process (\d+)", self.written())}

    def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not true():
            assert time.monotonic() < until, self.written()
            time.sleep(0.05)

    def written(self) -> str:
        return self._out.read_text()

    def wait_for(self, words: str) -> None:
        self._until(lambda: words in self.written())

    def end(self, number: signal.Signals) -> None:
        """Let the launcher end the job, once all ranks block their interpreters."""
        self._until(lambda: len(re.findall(r"rank \d blocks", self.written())) == len(self.pids))
        time.sleep(0.5)
        self._process.send_signal(number)
        self._process.wait(60)

    def close(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):  # the launcher ends the others
                os.kill(pid, signal.SIGKILL)
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module", params=["", "abab"], ids=["one host", "two hosts"])
def hang(request, tmp_path_factory) -> Iterator[Hang]:
    started = Hang(tmp_path_factory.mktemp("hang"), request.param)
    yield started
    started.close()


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [os.environ["TEST_PYTHON"], "-m", "xvcomm", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def verdict_is_right(text: str) -> None:
    assert re.search(
        r"Rank 3 never called all_reduce #1 of 16 x float32 that ranks 0 and 1 are in since .* \(hang\.py:\d+\): ", text
    )
    assert "rank 3 is stopped by a signal" in text or re.search(r"rank 3 .*does not answer", text), text
    assert re.search(r"rank 2 is outside xvcomm in holds_the_interpreter_lock \(.*/hang\.py:\d+\)", text), text


def test_from_another_shell(hang: Hang) -> None:
    found = explain(str(hang.pids[0]))
    assert found.returncode == 0, found.stderr
    verdict_is_right(found.stdout)
    job = found.stdout.split("job ")[1].split(",")[0]
    assert explain(job[:-3]).stdout.splitlines()[1][:60] == found.stdout.splitlines()[1][:60]
    if hang.host:
        verdict_is_right(explain(hang.host).stdout)
    told = json.loads(explain("--json", job).stdout)
    assert set(told["ranks"]) == {"0", "1", "2", "3"} and "holds_the_interpreter_lock" in told["ranks"]["2"]["stack"]


def test_a_trace_tells_what_carries_operations(hang: Hang, tmp_path: Path) -> None:
    """Those of the host's ranks that answer, one of them or two, and which connections to other hosts do."""
    command = [os.environ["TEST_PYTHON"], "-m", "xvcomm", "trace", str(hang.pids[0]), "--format", "json", "--json"]
    found = subprocess.run([*command, tmp_path / "line.json"], capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(found.stdout)
    rails = [(row["sent"] > 1 << 20, row["received"] > 1 << 20) for row in told["rails"]]
    events = json.loads((tmp_path / "line.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert ("send", "tcp" if hang.host else "shm") in {(row["op"], row["way"]) for row in told["operations"]}
    assert bool(rails) == any(name.startswith("rail ") for name in tracks) == bool(hang.host)
    assert sum(map(sum, rails)) >= 2 * bool(hang.host)


def test_ranks_that_do_not_answer_hide_none_that_does(tmp_path: Path) -> None:
    """Of four ranks of this host only the last one can tell of the other host's."""
    with contextlib.closing(Hang(tmp_path, "aaaab", STOPS, stopped=range(3))) as hang:
        told = json.loads(explain("--json", str(hang.pids[3])).stdout)["ranks"]
    assert set(told) == {"0", "1", "2", "3", "4"}
    assert {rank for rank, state in told.items() if state["stopped"]} == {"0", "1", "2"}


def test_on_a_signal(hang: Hang) -> None:
    os.kill(hang.pids[0], signal.SIGUSR1)
    hang.wait_for("Waiting ranks")
    time.sleep(0.3)
    verdict_is_right(hang.written())


def test_of_no_job() -> None:
    found = explain("no-such-job")
    assert found.returncode == 2 and ("no job of this user" in found.stderr or "is no job" in found.stderr)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ('raise ValueError("no such file")', r"ValueError: no such file"),
        ('with comm: raise ValueError("no such file")', r"ValueError: no such file"),
        ("import os; os.kill(os.getpid(), 9)", "its process has ended"),
        ("import os; os.kill(os.getpid(), 15)", "its process has ended"),
    ],
    ids=["exception", "exception in the block", "SIGKILL", "SIGTERM"],
)
def test_dumps_of_a_job_that_has_ended(tmp_path: Path, end: str, told: str) -> None:
    script, dumps = tmp_path / "end.py", tmp_path / "dumps"
    script.write_text(END.replace("END", end))
    subprocess.run(
        [os.environ["TEST_PYTHON"], "-m", "xvcomm", "run", "-n", "3", str(script)],
        env=os.environ | {"XVCOMM_TRACE_DIR": str(dumps)}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert len(list(dumps.glob("*.xvdump"))) == 3
    found = explain(str(dumps))
    assert found.returncode == 0, found.stderr
    assert re.search(
        r"Rank 1 never called all_reduce #1 of 16 x float64 that ranks 0 and 2 are in .*end\.py:\d+.*: rank 1 has ended "
        rf"\({told}\)", found.stdout,
    ), found.stdout  # fmt: skip


def dumped(folder: Path, script: str, ranks: int = 3, python: str = "") -> Snapshot | None:
    """The dumps that a job with this program leaves, if there are any."""
    program, dumps = folder / "program.py", folder / "dumps"
    program.write_text(script)
    command = [os.environ["TEST_PYTHON"], "-m", "xvcomm", "run", "-n", str(ranks)]
    done = subprocess.run(
        [*command, python or command[0], str(program)],
        env=os.environ | {"XVCOMM_TRACE_DIR": str(dumps)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return load_folder(dumps) if dumps.exists() else pytest.fail(done.stderr) if "Traceback" in done.stderr else None


@pytest.mark.parametrize(("code", "dumps"), [("", False), ("0", False), ("3", True)])
def test_a_regular_exit_leaves_no_dump(tmp_path: Path, code: str, dumps: bool) -> None:
    found = dumped(
        tmp_path, f"import sys, xvcomm\nwith xvcomm.init() as comm:\n    comm.barrier()\n    sys.exit({code})", 1
    )
    assert (found is not None) == dumps
    if found is not None:
        assert found.ranks[0].ending == "SystemExit: 3"


def test_a_program_that_raises_on_sigterm_leaves_dumps(tmp_path: Path) -> None:
    """Also while it waits in an operation, as docs/observability.md says."""
    found = dumped(tmp_path, TERMINATED, 2)
    assert found is not None
    assert [OpCode(state.records[-1].op) for state in found.ranks.values()] == [OpCode.RECV] * 2


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_ranks_that_their_launcher_ends_are_written_down(tmp_path: Path, end: signal.Signals) -> None:
    """All at once, by the signal's default action, or by SIGKILL, since they handle none: no rank writes anything."""
    with contextlib.closing(Hang(tmp_path, "", LOCKED, dumps=tmp_path / "dumps", stopped=())) as hang:
        hang.end(end)
    found = load_folder(tmp_path / "dumps")
    assert [OpCode(state.records[-1].op) for state in found.ranks.values()] == [OpCode.RECV] * 2 + [OpCode.BARRIER] * 2
    assert re.search(
        r"Rank ([23]) does not send in the recv from rank \1 .*hang\.py:\d+", explain(str(tmp_path / "dumps")).stdout
    )


def test_ranks_that_die_at_once_are_written_down(tmp_path: Path) -> None:
    """Both are dead before the survivor handles the first death: it holds the interpreter until then."""
    found = dumped(tmp_path, BOTH_DIE)
    assert found is not None
    for rank in (0, 1):
        assert found.ranks[rank].ending == "its process has ended" and found.ranks[rank].records


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("die", ["{0}", "{0, 2}"], ids=["rank 0", "its host"])
def test_dumps_of_hosts_with_different_clocks(tmp_path: Path, die: str) -> None:
    """They have the clock of rank 0's host, as it was compared while the job ran, also if that is lost."""
    shift = tmp_path / "shift.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shift, "-x", "c", "-"], input=SHIFT, text=True, check=True)
    label = (
        "import os, sys\nhere = 'abab'[int(os.environ['RANK'])]\n"
        f"if here == 'b' and 'LD_PRELOAD' not in os.environ:\n    os.environ['LD_PRELOAD'] = {str(shift)!r}\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv])\nos.environ['XVCOMM_HOST'] = here\n"
    )
    found = dumped(tmp_path, label + SOME_DIE.replace("DIE", die), 4, sys.executable)  # which loads the library
    assert found is not None
    known = {rank: state for rank, state in found.ranks.items() if state.records}
    ahead = {rank: state.ahead / 1e9 for rank, state in known.items()}
    far = pytest.approx(100, abs=1)
    assert ahead == ({1: far, 3: far} if "2" in die else {0: 0, 1: far, 2: 0, 3: far})
    ended = [state.records[0].ended - state.ahead for state in known.values()]
    assert max(ended) - min(ended) < 50e9


def be_in_a_group_of_its_own(comm):
    if comm.rank == 1:
        os.setpgid(0, 0)
    comm.barrier()


def test_only_ranks_that_the_launcher_ends_are_written_down(tmp_path: Path) -> None:
    """Others of the job go on, and what they have open is not looked at before the signal."""
    with World(2) as world:
        world.run(be_in_a_group_of_its_own)
        dumps = LastDumps({"XVCOMM_TRACE_DIR": str(tmp_path)}, pytest.fail)
        dumps.take([world.pids()[1]])
        dumps.finish()
    (written,) = tmp_path.iterdir()
    assert written.name.endswith(f"-rank-1{SUFFIX}")
