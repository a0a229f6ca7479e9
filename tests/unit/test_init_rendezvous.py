"""Ranks connect in every supported way, as threads with separate environments."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from xvcomm.abc.store import Store
from xvcomm.comm import init
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.environment import LauncherEnvironment, discover
from xvcomm.rendezvous.store import FileStore, MemoryStore, TcpServer, join_barrier
from xvcomm.rendezvous.store.hosting import Invitation, own_address
from xvcomm.rendezvous.store.server import CLOSE_GRACE
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("fake_communicator")
SOON = 60.0
Env = dict[str, str]


def ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """The result or error of each of `size` threads."""

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
    """Every rank joins, sees the others' keys and closes, repeatedly and at different speeds."""
    began = time.monotonic()

    def life(rank: int) -> str:
        for turn in range(3):
            comm: Any = init.init(env=env(rank), **arguments)
            assert (comm.rank, comm.size) == (rank, count)
            comm.store.set(f"k{rank}", b"%d" % turn)
            for other in range(count):
                assert comm.store.get(f"k{other}", Deadline.after(SOON)) == b"%d" % turn
            time.sleep(0.02 * ((rank + 1) % count))
            comm.close()
        return "ok"

    assert ranks(count, life) == ["ok"] * count
    assert time.monotonic() - began < CLOSE_GRACE / 2


def test_the_fake_joins_like_the_real_one() -> None:
    fake = sys.modules["xvcomm.comm.communicator"].Communicator
    assert fake is not Communicator
    assert list(inspect.signature(fake.join).parameters) == list(inspect.signature(Communicator.join).parameters)


def test_single() -> None:
    comm: Any = init.init(env={})
    assert (comm.rank, comm.size) == (0, 1)
    comm.close()


def test_rank_0_serves(address: str) -> None:
    meet_and_leave(lambda rank: numbered(rank, 3, XVCOMM_STORE=address, XVCOMM_SECRET="s"), 3)


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
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "here",
        "XVCOMM_TIMEOUT": "20",
    }
    meet_and_leave(lambda rank: {**slurm, "SLURM_PROCID": str(rank), "XVCOMM_SECRET": "s"}, 2)
    with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
        init.init(env={**slurm, "SLURM_PROCID": "0"})


def test_rank_0_may_close_first(address: str) -> None:
    closing = threading.Event()

    def life(rank: int) -> str:
        comm: Any = init.init(env=numbered(rank, 2, XVCOMM_STORE=address, XVCOMM_SECRET="s"))
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


def test_the_missing_are_named_on_all_that_came(address: str) -> None:

    def life(rank: int) -> None:
        init.init(env=numbered(rank, 4, XVCOMM_STORE=address, XVCOMM_SECRET="s"), timeout=0.5 + 0.3 * rank)

    for error in ranks(2, life):
        assert isinstance(error, DeadlineExceeded) and "ranks 2, 3 of 4" in str(error)


def test_rank_0_is_missing(address: str) -> None:
    env = numbered(1, 2, XVCOMM_STORE=address, XVCOMM_SECRET="s")
    with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
        init.init(env=env, timeout=0.1)


def test_a_failed_attempt_may_be_repeated(address: str) -> None:

    def env(rank: int) -> Env:
        return numbered(rank, 2, XVCOMM_STORE=address, XVCOMM_SECRET="s")

    with pytest.raises(DeadlineExceeded):
        init.init(env=env(0), timeout=0.05)
    meet_and_leave(env, 2)


def test_a_wrong_secret_is_known_on_both_sides(address: str) -> None:

    def life(rank: int) -> None:
        init.init(env=numbered(rank, 2, XVCOMM_STORE=address, XVCOMM_SECRET=f"s{rank}"), timeout=0.5)

    waiting, refused = ranks(2, life)
    assert isinstance(refused, AuthenticationError) and "XVCOMM_SECRET" in str(refused)
    assert isinstance(waiting, DeadlineExceeded) and "rank 1 of 2" in str(waiting)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        env = numbered(0, 2, XVCOMM_STORE=f"tcp://127.0.0.1:{port}", XVCOMM_SECRET="s")
        with pytest.raises(StoreError, match=f"port {port} .*in use"):
            init.init(env=env, timeout=0.2)


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
        init.init(env=env)
    for name in names:
        assert name in str(caught.value)


def test_objects_that_are_no_store() -> None:
    with pytest.raises(ArgumentError, match="mpi4py"):
        init.init(store=object(), env={})


def test_an_mpi_of_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 1

    monkeypatch.setattr(init, "world", Alone)
    with pytest.raises(ConfigError, match=r"rank 1 of 2.*rank 0 of 1.*XVCOMM_STORE"):
        init.init(env={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.filterwarnings("ignore:the ranks meet through torch:RuntimeWarning")
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
        init.init(env=env)
    for name in names:
        assert name in str(caught.value)


def test_a_failed_join_leaves_nothing(port: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(sys.modules["xvcomm.comm.communicator"].Communicator, "join", join)
    with pytest.raises(MemoryError):
        init.init(env=numbered(0, 2, XVCOMM_STORE=address, XVCOMM_SECRET="s"))
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_rendezvous_gives_a_store() -> None:
    store: Store = init.rendezvous(LauncherEnvironment(0, 1, 0, 1, "single"), Config(), {}, Deadline.after(SOON))
    assert join_barrier(store, 0, 1, b"x", Deadline.after(SOON)) == [b"x"]


@pytest.mark.parametrize("secret", [None, "own secret"])
def test_torchs_store_between_hosts_gets_no_secret_of_the_users(
    monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    """Its port asks nobody for a password: the user's secret stays out of it, and without one a warning says so."""
    try:
        host = own_address()
    except StoreError:
        pytest.skip("only loopback here")
    bootstrap = MemoryStore()
    monkeypatch.setattr(init, "torch_store", lambda *_: bootstrap)
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": "29500"}
    config = Config(secret=secret)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = init.rendezvous(discover(env, config), config, env, Deadline.after(SOON))
    try:
        note = bootstrap.get("xvcomm-0//0/2/invitation", Deadline.after(0))
        assert Invitation.unpack(note).secret != secret
        assert bool(Invitation.unpack(note).secret) is (secret is None)
        assert ["XVCOMM_SECRET" in str(warning.message) for warning in caught] == [True] * (secret is None)
    finally:
        store.close()


@pytest.mark.parametrize("secret", [{}, {"XVCOMM_SECRET": "own secret"}])
def test_a_store_of_torchs_that_the_caller_gives(secret: Env) -> None:
    """With a secret, it only holds each rank's job count and each job's invitation."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    meet_and_leave(lambda rank: numbered(rank, 2, **secret), 2, store=dist.PrefixStore("user", store))
    assert (store.num_keys() == 2 + 3) is bool(secret)


@pytest.mark.parametrize(
    ("where", "here", "there"), [(0, "not on this rank", "on rank 0"), (1, "on this rank", "rank 0")]
)
def test_a_secret_on_one_rank_only(where: int, here: str, there: str) -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()

    def work(rank: int) -> None:
        secret = {"XVCOMM_SECRET": "s"} if rank == where else {}
        init.init(env=numbered(rank, 2, **secret), store=store, timeout=1.0)

    assert isinstance((error := ranks(2, work)[1]), ConfigError)
    assert "XVCOMM_SECRET" in str(error) and here in str(error) and there in str(error)


@pytest.mark.parametrize("secret", [{}, {"XVCOMM_SECRET": "s"}])
def test_a_store_of_torchs_between_hosts_without_a_secret(secret: Env) -> None:
    dist = pytest.importorskip("torch.distributed")
    try:
        host = own_address()
    except StoreError:
        pytest.skip("only loopback here")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(DeadlineExceeded):
        warnings.simplefilter("always")
        init.init(env=numbered(0, 2, **secret), store=dist.PrefixStore("user", store), timeout=0.3)
    assert ["XVCOMM_SECRET" in str(warning.message) for warning in caught] == [True] * (not secret)
