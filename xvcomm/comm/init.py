"""`init()`: joins the job and creates its communicator."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xvcomm.abc.store import NotSet, PrefixStore, Store
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, ConfigError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.rendezvous import returning
from xvcomm.rendezvous.environment import LauncherEnvironment, discover
from xvcomm.rendezvous.kubernetes import this_pod
from xvcomm.rendezvous.slurm import slurm_address
from xvcomm.rendezvous.store import FileStore, MemoryStore, StoreAddress, TcpStore, awaits, need_secret
from xvcomm.rendezvous.store.folder import lives
from xvcomm.rendezvous.store.hosting import loopback, meet, own_address, protect, serve_or_join
from xvcomm.rendezvous.store.wrappers import JaxStore, TorchStore, mpi_store, torch_store, world
from xvcomm.system import interrupts, limits
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

_PROCESS = uuid.uuid4().hex
_LINGER_SECONDS = 3.0
# Number of communicators that this process has had at a rendezvous address, as a rank. The next one uses it as epoch, so that
# it cannot join a store that other ranks have not closed yet.
_epochs: Counter[tuple[str, int]] = Counter()
_rejoined: set[int] = set()
"""The process that has joined a job that ran; what it joins afterwards begins."""


@limits.told("join the job")
def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    store: Any = None,
    island: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Communicator:
    """Join the job and return its communicator; every rank must call this equally often.

    Rank, size and store are taken from the arguments, else from `XVCOMM_*`, else from the launcher: torchrun, mpirun, SLURM,
    JAX, Kubernetes. Without any of them the job has this process only. Blocks until all ranks have joined.

    With `XVCOMM_REJOIN=1` this process joins a job that runs, in the place of a rank that was lost: the first call blocks
    until the ranks of the job call `grow`, whose communicator it returns. The store must be an address or a `Store`.

    Args:
        rank: rank of this process.
        size: number of ranks.
        store: rendezvous of the ranks: a `Store`, a `torch.distributed` store, an mpi4py communicator, the client of
            `jax.distributed`, or an address as in `XVCOMM_STORE`. Objects remain open after `close`.
        island: label of this rank's island, instead of the detected one.
        device: device type of this rank, `"cuda"`, optionally with an index, `"cuda:1"`.
        timeout: seconds to join, and the default timeout of operations. Without it, a process that joins a job that runs
            waits for `XVCOMM_REJOIN_TIMEOUT`.
        env: variables to use instead of `os.environ`.

    Raises:
        ConfigError: a variable is missing or invalid, or two processes have the same rank; the latter on all ranks.
        ArgumentError: `store` is none of the above, or `device` is malformed.
        DeadlineExceeded: names the ranks that did not join; on all ranks that did.
        PeerLost: a rank ended while others joined; names it. On all ranks that have joined.
        StoreError: the store cannot be reached, or its port is in use.
        AuthenticationError: the store has a different secret.
        ResourceError: a limit of the system is reached; says how to raise it.
    """
    interrupts.print_shortly()
    # Imported here because it loads compiled code, which would slow down `import xvcomm`.
    from xvcomm.comm.communicator import Communicator

    env = os.environ if env is None else env
    config = _configure(env, rank=rank, size=size, store=store, island=island, device=device, timeout=timeout)
    launcher = _launched(env, config)
    config = replace(
        config, rank=launcher.rank, size=launcher.size, local_rank=launcher.local_rank, local_size=launcher.local_size
    )
    deadline = Deadline.after(config.timeout)
    returns = config.rejoin and os.getpid() not in _rejoined
    if returns:
        waiting = deadline if timeout is not None else Deadline.after(config.rejoin_timeout)
        found = _rejoin(store, launcher, config, env, deadline, waiting)
        if found is not None:
            return found
    if store is None or isinstance(store, str):
        base, place = rendezvous(launcher, config, env, deadline), _place(launcher, config)
    else:
        base, place = _wrap(store, launcher, env, deadline, config.secret), None

    try:
        space = _namespace(base, launcher.rank, env, deadline, _epochs[place, launcher.rank] if place else 0)
        comm = Communicator.join(
            space, launcher.rank, launcher.size, config=config, deadline=deadline, on_close=base.close
        )
        if returns:
            _return(base, launcher, deadline)
    except BaseException as error:
        wrong = isinstance(error, ConfigError) and launcher.rank == 0 and launcher.size > 1
        if wrong or (isinstance(error, PeerLost) and base.served_here):
            # Keep serving for a moment, so that ranks that come later get this error instead of waiting for a server.
            time.sleep(_LINGER_SECONDS)
        base.close()
        raise
    if place is not None:
        _epochs[place, launcher.rank] += 1
    return comm


def rendezvous(launcher: LauncherEnvironment, config: Config, env: Mapping[str, str], deadline: Deadline) -> Store:
    """Open the store in which the ranks of a job meet, as selected by settings or launcher. Closing it stops its server.

    `XVCOMM_STORE=tcp://host:port` is served by rank 0, with `?hosted=launcher` by the launcher; `file:///folder` needs no
    server. Without the variable, torchrun's store or MPI transmits the address of a TCP store that rank 0 serves on a free
    port; under SLURM and in pods its address is derived from variables; under JAX the coordination service is the store.

    Args:
        launcher: rank and size of this process.
        config: settings; `store` and `secret` are used here.
        env: environment of the process.
        deadline: for all of it.

    Raises:
        ConfigError: no address is configured, or the secret is missing.
        DeadlineExceeded: rank 0 did not come in time.
        StoreError: the store cannot be reached, or its port is in use.
        AuthenticationError: the store has a different secret.
    """
    if config.store is not None:
        return _by_address(launcher, config, deadline)
    if launcher.size == 1:
        return MemoryStore()
    jax = _jax_state()
    if jax is not None and (jax.process_id, jax.num_processes) == (launcher.rank, launcher.size):
        bootstrap = PrefixStore(f"xvcomm-{_epochs[_place(launcher, config), launcher.rank]}", JaxStore(jax.client))
        return protect(bootstrap, launcher.rank, _host(launcher), deadline, config.secret)
    if launcher.name == "torchrun":
        return _by_torchrun(launcher, config, env, deadline)
    if launcher.name == "mpi":
        return mpi_store(_checked_world(launcher), _host(launcher), deadline, config.secret)
    if launcher.name == "slurm":
        host, port = slurm_address(env)
        host = loopback() if _is_loopback(host) else host
        epoch = _epochs[_place(launcher, config), launcher.rank]
        return serve_or_join(host, port, need_secret(config.secret), launcher.rank, deadline, epoch)
    if launcher.name == "kubernetes" and (pod := this_pod(env)) is not None:
        epoch = _epochs[_place(launcher, config), launcher.rank]
        return serve_or_join(pod.host, pod.port, need_secret(config.secret), launcher.rank, deadline, epoch)
    if launcher.name == "jax":
        raise ConfigError(
            "JAX_PROCESS_ID is set but jax.distributed is not initialized with these numbers: call "
            "jax.distributed.initialize() before xvcomm.init(), or set XVCOMM_STORE and XVCOMM_SECRET"
        )
    raise ConfigError(
        f"rank {launcher.rank} of {launcher.size} has no address for the rendezvous: set XVCOMM_STORE=tcp://host:port, where "
        "host is that of rank 0, and XVCOMM_SECRET, both the same on all ranks"
    )


def _configure(env: Mapping[str, str], *, store: Any, **given: Any) -> Config:
    """The settings of the environment, overridden by the arguments of `init`."""
    given = {name: value for name, value in given.items() if value is not None}
    kind, colon, index = str(given.get("device", "")).partition(":")
    if colon:
        if not index.isdigit():
            raise ArgumentError(f"device={given['device']!r}: expected a type and an index, like 'cuda:1'")
        given |= {"device": kind, "device_index": int(index)}
    if isinstance(store, str):
        given["store"] = store
    elif _is_mpi(store):
        given = {"rank": store.Get_rank(), "size": store.Get_size(), **given}
    return replace(Config.from_env(env), **given)


def _by_address(launcher: LauncherEnvironment, config: Config, deadline: Deadline) -> Store:
    assert config.store is not None
    address = StoreAddress.parse(config.store)
    epoch = _epochs[_place(launcher, config), launcher.rank]
    if address.folder is not None:
        FileStore(address.folder)  # raises ConfigError if others can change its contents
        store = FileStore(address.folder / str(epoch), ranks=launcher.size)
        store.enter(launcher.size, deadline)
        return store
    secret = need_secret(config.secret)
    if address.hosted:
        return TcpStore(address.host, address.port, secret, deadline)
    return serve_or_join(address.host, address.port, secret, launcher.rank, deadline, epoch)


def _by_torchrun(launcher: LauncherEnvironment, config: Config, env: Mapping[str, str], deadline: Deadline) -> Store:
    place = f"xvcomm-{_epochs[_place(launcher, config), launcher.rank]}"
    folder = _agent_folder(launcher, env)
    if folder is not None:
        return meet(FileStore(folder / place, ranks=1), launcher.rank, loopback(), deadline, config.secret)
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ConfigError(
            f"MASTER_ADDR={host or ''!r} and MASTER_PORT={port!r} are not an address of rank 0; start the ranks with "
            "torchrun, set both, or set XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET"
        )
    if launcher.rank == 0 and not config.secret:
        _warn_of_torchs_store(f"{host}:{port}", launcher)
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    bootstrap = torch_store(host, int(port), launcher.rank == 0 and not agent, deadline)
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{_attempt(env)}/{launcher.size}"
    return meet(PrefixStore(f"{place}/{run}", bootstrap), launcher.rank, host, deadline, config.secret)


def _warn_of_torchs_store(address: str | None, launcher: LauncherEnvironment) -> None:
    """Warn if a job over several hosts uses torch's unauthenticated store without XVCOMM_SECRET."""
    if address is None or _is_loopback(address) or launcher.local_size == launcher.size:
        return
    warnings.warn(
        f"the ranks exchange addresses through torch's store at {address}, which has no authentication: everyone who "
        "can reach it can read and change these messages. Set XVCOMM_SECRET to the same random text on all "
        "ranks, for instance the output of `openssl rand -hex 16`",
        RuntimeWarning,
        stacklevel=4,
    )


def _is_loopback(host: str) -> bool:
    return host.startswith(("localhost", "::1", "127."))


def _agent_folder(launcher: LauncherEnvironment, env: Mapping[str, str]) -> Path | None:
    """A folder of this restart attempt if one torchrun started all ranks; using it avoids the import of torch.

    torchrun creates `attempt_N/LOCAL_RANK/error.json` for each rank. All ranks get the same result, because the same torchrun
    tells them the same sizes.
    """
    error_file = Path(env.get("TORCHELASTIC_ERROR_FILE") or "/")
    rank_folder, attempt_folder = error_file.parent, error_file.parent.parent
    alone = launcher.local_size == launcher.size
    usual = rank_folder.name == str(launcher.local_rank) and attempt_folder.name == f"attempt_{_attempt(env)}"
    return attempt_folder if alone and usual else None


def _checked_world(launcher: LauncherEnvironment) -> Any:
    comm = world()
    if (comm.Get_rank(), comm.Get_size()) != (launcher.rank, launcher.size):
        raise ConfigError(
            f"mpirun says rank {launcher.rank} of {launcher.size}, but mpi4py says rank {comm.Get_rank()} of "
            f"{comm.Get_size()}: it uses another MPI than this mpirun; install mpi4py for it, use its own mpirun, "
            "or set XVCOMM_STORE=tcp://host:port and XVCOMM_SECRET"
        )
    return comm


def _launched(env: Mapping[str, str], config: Config) -> LauncherEnvironment:
    launcher = discover(env, config)
    jax = _jax_state()
    if launcher.name == "single" and jax is not None:
        return LauncherEnvironment(jax.process_id, jax.num_processes, None, None, "jax")
    return launcher


def _jax_state() -> Any:
    """State of `jax.distributed` if this process has initialized it; never imports jax."""
    module = sys.modules.get("jax._src.distributed")
    state = getattr(module, "global_state", None)
    return None if state is None or state.client is None else state


def _wrap(
    store: Any, launcher: LauncherEnvironment, env: Mapping[str, str], deadline: Deadline, secret: str | None
) -> Store:
    """The caller's object as a Store whose `close` leaves the object open.

    The stores of torch and JAX have no authentication: with a secret they only transmit the address of a store that rank 0
    serves.
    """
    if isinstance(store, Store):
        return PrefixStore("init", store)
    if _is_mpi(store):
        return mpi_store(store, _host(launcher), deadline, secret)
    bootstrap: Store
    if hasattr(store, "key_value_set_bytes"):
        bootstrap = JaxStore(store)
    elif all(hasattr(store, name) for name in ("set", "get", "add", "check")):
        bootstrap = TorchStore(store)
        if launcher.rank == 0 and not secret:
            _warn_of_torchs_store(getattr(_underlying(store), "host", None), launcher)
    else:
        raise _no_store(store)
    return protect(
        _namespace(bootstrap, launcher.rank, env, deadline, None),
        launcher.rank,
        _host(launcher),
        deadline,
        secret,
    )


def _underlying(store: Any) -> Any:
    """The store inside torch's `PrefixStore`."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _no_store(store: Any) -> ArgumentError:
    return ArgumentError(
        f"store={store!r}: expected an xvcomm Store, a torch.distributed store, an mpi4py communicator, the client of "
        "jax.distributed, or an address such as tcp://host:port"
    )


def _is_mpi(store: Any) -> bool:
    return hasattr(store, "Get_rank") and hasattr(store, "Ibcast")


def _host(launcher: LauncherEnvironment) -> str:
    """Address of this host for the other ranks."""
    return loopback() if launcher.local_size == launcher.size else own_address()


def _place(launcher: LauncherEnvironment, config: Config) -> str:
    return config.store or launcher.name


def _attempt(env: Mapping[str, str]) -> str:
    return env.get("TORCHELASTIC_RESTART_COUNT") or "0"


def _namespace(store: Store, rank: int, env: Mapping[str, str], deadline: Deadline, epoch: int | None) -> Store:
    """A part of the store that no earlier communicator has used.

    Args:
        epoch: of the job, for processes that join it meanwhile; None if it does not run in this store.

    A store may be used by many communicators in turn. Every process counts its own in the store. The key contains the process,
    so that a second process with the same rank also begins at the first part, where `join_barrier` detects it.
    """
    place = f"xvcomm/{_attempt(env)}"
    turn = store.add(_turns(place, rank), 1, deadline)
    if rank == 0 and epoch is not None:
        store.set(f"{place}/running", b"%d %d" % (turn, epoch), deadline)
    return PrefixStore(f"{place}/{turn}", store)


def _turns(place: str, rank: int) -> str:
    return f"{place}/turns/{rank}/{_PROCESS}-{os.getpid()}"  # the pid, because a fork copies _PROCESS


def _rejoin(
    store: Any, launcher: LauncherEnvironment, config: Config, env: Mapping[str, str], deadline: Deadline, waiting: Deadline
) -> Communicator | None:  # fmt: skip
    """Join a job that runs; serves no store and counts for none, because the job's is there already.

    None if the job waits for this rank to begin, as the process before has ended too early: it is to join as any other.

    Args:
        deadline: to find the job.
        waiting: to be taken in.
    """
    from xvcomm.comm.communicator import Communicator

    if not (store is None or isinstance(store, str | Store)):
        refuse_rejoining(f"a store that is a {type(store).__name__}")
    base = PrefixStore("init", store) if isinstance(store, Store) else _running(config, deadline)
    try:
        turn, epoch = _current(base, launcher, env, deadline)
        space, begins = PrefixStore(f"xvcomm/{_attempt(env)}/{turn}", base), turn == 0
        if not begins:
            begins = awaits(PrefixStore("join", space), launcher.rank, deadline)
            turns = _turns(f"xvcomm/{_attempt(env)}", launcher.rank)
            base.add(turns, turn - begins, deadline)  # as if it had been there before
        if not isinstance(store, Store):
            _epochs[_place(launcher, config), launcher.rank] = epoch + (not begins)
        if begins:
            base.close()
            return None
        comm = Communicator.rejoin(space, launcher.rank, config=config, deadline=waiting, on_close=base.close)
        _return(base, launcher, Deadline.after(config.timeout))
    except BaseException:
        base.close()
        raise
    return comm


def refuse_rejoining(what: str) -> None:
    """Raise ConfigError if this process is still to join a job that runs, since it cannot with what it uses.

    Args:
        what: it uses, in words.
    """
    if os.getpid() not in _rejoined:
        raise ConfigError(
            f"a rank that was started again (XVCOMM_REJOIN=1) cannot join the others through {what}: use torchrun "
            "--max-restarts, which starts all ranks again, or join by xvcomm.init() with an address in XVCOMM_STORE first"
        )


def _current(
    store: Store, launcher: LauncherEnvironment, env: Mapping[str, str], deadline: Deadline
) -> tuple[int, int]:
    """Turn and epoch of the job that runs in a store; zeros if rank 0 is to begin the first one."""
    try:
        found = store.get(f"xvcomm/{_attempt(env)}/running", Deadline.after(0) if launcher.rank == 0 else deadline)
    except NotSet:
        if launcher.rank == 0:
            return 0, 0
        raise DeadlineExceeded(
            "no job runs in this store, which XVCOMM_REJOIN=1 is to join: unset XVCOMM_REJOIN", rank=launcher.rank
        ) from None
    turn, epoch = map(int, found.split())
    return turn, epoch


def _return(store: Store, launcher: LauncherEnvironment, deadline: Deadline) -> None:
    """Note that this process has joined the job in the place of another one."""
    _rejoined.add(os.getpid())
    with contextlib.suppress(XvcommError):
        returning.tell(store, launcher.rank, deadline)


def _running(config: Config, deadline: Deadline) -> Store:
    """The store of a job that runs."""
    if config.store is None:
        raise ConfigError(
            "XVCOMM_REJOIN=1 needs XVCOMM_STORE, the address of the store of the job that runs: a launcher serves it, or it is "
            "a folder, or rank 0 serves it and lives"
        )
    address = StoreAddress.parse(config.store)
    if address.folder is None:
        return TcpStore(address.host, address.port, need_secret(config.secret), deadline, epoch=None)
    epochs = [path for path in address.folder.glob("*") if path.name.isdigit()]
    return FileStore(max(epochs, key=lambda path: (lives(path), int(path.name)), default=address.folder / "0"))
