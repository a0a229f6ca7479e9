"""`init()`: joins the job and creates its communicator."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.comm.rejoining import has_rejoined, note_rejoined, rejoin
from xvcomm.comm.store_parts import attempt, epoch, namespace, set_epoch
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, ConfigError, PeerLost
from xvcomm.rendezvous.environment import LauncherEnvironment, discover
from xvcomm.rendezvous.kubernetes import this_pod
from xvcomm.rendezvous.slurm import slurm_address
from xvcomm.rendezvous.store import FileStore, MemoryStore, StoreAddress, TcpStore, need_secret
from xvcomm.rendezvous.store.hosting import loopback, meet, own_address, protect, serve_or_join
from xvcomm.rendezvous.store.wrappers import JaxStore, TorchStore, mpi_store, torch_store, world
from xvcomm.system import interrupts, limits
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

_LINGER_SECONDS = 3.0


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
    returns = config.rejoin and not has_rejoined()
    if returns:
        waiting = deadline if timeout is not None else Deadline.after(config.rejoin_timeout)
        found = rejoin(store, launcher, config, env, deadline, waiting)
        if found is not None:
            return found
    by_address = store is None or isinstance(store, str)
    if by_address:
        base = rendezvous(launcher, config, env, deadline)
    else:
        base = _wrap(store, launcher, env, deadline, config.secret)

    try:
        space = namespace(base, launcher.rank, env, deadline, epoch(launcher, config) if by_address else 0)
        comm = Communicator.join(
            space, launcher.rank, launcher.size, config=config, deadline=deadline, on_close=base.close
        )
        if returns:
            note_rejoined(base, launcher, deadline)
    except BaseException as error:
        wrong = isinstance(error, ConfigError) and launcher.rank == 0 and launcher.size > 1
        if wrong or (isinstance(error, PeerLost) and base.served_here):
            # Keep serving for a moment, so that ranks that come later get this error instead of waiting for a server.
            time.sleep(_LINGER_SECONDS)
        base.close()
        raise
    if by_address:
        set_epoch(launcher, config, epoch(launcher, config) + 1)
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
        bootstrap = PrefixStore(f"xvcomm-{epoch(launcher, config)}", JaxStore(jax.client))
        return protect(bootstrap, launcher.rank, _host(launcher), deadline, config.secret)
    if launcher.name == "torchrun":
        return _by_torchrun(launcher, config, env, deadline)
    if launcher.name == "mpi":
        return mpi_store(_checked_world(launcher), _host(launcher), deadline, config.secret)
    if launcher.name == "slurm":
        host, port = slurm_address(env)
        host = loopback() if _is_loopback(host) else host
        return serve_or_join(host, port, need_secret(config.secret), launcher.rank, deadline, epoch(launcher, config))
    if launcher.name == "kubernetes" and (pod := this_pod(env)) is not None:
        secret = need_secret(config.secret)
        return serve_or_join(pod.host, pod.port, secret, launcher.rank, deadline, epoch(launcher, config))
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
    if address.folder is not None:
        FileStore(address.folder)  # raises ConfigError if others can change its contents
        store = FileStore(address.folder / str(epoch(launcher, config)), ranks=launcher.size)
        store.enter(launcher.size, deadline)
        return store
    secret = need_secret(config.secret)
    if address.hosted:
        return TcpStore(address.host, address.port, secret, deadline)
    return serve_or_join(address.host, address.port, secret, launcher.rank, deadline, epoch(launcher, config))


def _by_torchrun(launcher: LauncherEnvironment, config: Config, env: Mapping[str, str], deadline: Deadline) -> Store:
    place = f"xvcomm-{epoch(launcher, config)}"
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
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{attempt(env)}/{launcher.size}"
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
    usual = rank_folder.name == str(launcher.local_rank) and attempt_folder.name == f"attempt_{attempt(env)}"
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
        raise ArgumentError(
            f"store={store!r}: expected an xvcomm Store, a torch.distributed store, an mpi4py communicator, the client of "
            "jax.distributed, or an address such as tcp://host:port"
        )
    bootstrap = namespace(bootstrap, launcher.rank, env, deadline, None)
    return protect(bootstrap, launcher.rank, _host(launcher), deadline, secret)


def _underlying(store: Any) -> Any:
    """The store inside torch's `PrefixStore`."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_mpi(store: Any) -> bool:
    return hasattr(store, "Get_rank") and hasattr(store, "Ibcast")


def _host(launcher: LauncherEnvironment) -> str:
    """Address of this host for the other ranks."""
    return loopback() if launcher.local_size == launcher.size else own_address()
