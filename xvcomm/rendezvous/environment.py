"""Rank and size of this process, from the environment variables of its launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from xvcomm.config import Config
from xvcomm.errors import ConfigError
from xvcomm.rendezvous import kubernetes, slurm
from xvcomm.rendezvous.variables import integer


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """Place of this process among the processes of the job.

    Attributes:
        local_rank: number among the processes of this host; None if the launcher does not provide it.
        local_size: number of processes on this host; None if the launcher does not provide it.
        name: of the launcher: `explicit`, `torchrun`, `mpi`, `slurm`, `jax`, `kubernetes` or `single`.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    name: str


@dataclass(frozen=True, slots=True)
class _Variables:
    """Variable names of one launcher. Of several names for the size, the first that is set is used."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str = ""


_LAUNCHERS = (
    _Variables("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("mpi", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Variables("slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
    _Variables("jax", "JAX_PROCESS_ID", ("JAX_NUM_PROCESSES",), ""),
)
_SINGLE = LauncherEnvironment(0, 1, 0, 1, "single")


def discover(env: Mapping[str, str], config: Config) -> LauncherEnvironment:
    """Find rank and size of this process.

    `XVCOMM_RANK` with `XVCOMM_SIZE` comes first, then torchrun, OpenMPI, MPICH, SLURM, JAX and Kubernetes in this order. An
    `XVCOMM_*` number that is set overrides the launcher's. Without any of these variables the job has this process only.

    Args:
        env: environment of the process; empty variables count as unset.
        config: settings read from it, or given by the user.

    Raises:
        ConfigError: a variable is missing, is not an integer, or contradicts another; names them and what to set.
    """
    if config.rank is not None and config.size is not None:
        found = LauncherEnvironment(config.rank, config.size, config.local_rank, config.local_size, "explicit")
        _check(found, "XVCOMM_RANK", "XVCOMM_SIZE", "XVCOMM_LOCAL_RANK", "XVCOMM_LOCAL_SIZE")
        return found
    for variables in _LAUNCHERS:
        launcher = _read(env, variables)
        if launcher is not None:
            return _override(launcher, config)
    if env.get("PMIX_RANK") and config.size is not None:
        return _override(LauncherEnvironment(integer(env, "PMIX_RANK"), config.size, None, None, "mpi"), config)
    pod = kubernetes.this_pod(env)
    if pod is not None:
        return _override(LauncherEnvironment(pod.rank, pod.size, None, None, "kubernetes"), config)
    for name, other, given in (
        ("PMIX_RANK", "XVCOMM_SIZE", env.get("PMIX_RANK") or None),
        ("XVCOMM_RANK", "XVCOMM_SIZE", config.rank),
        ("XVCOMM_SIZE", "XVCOMM_RANK", config.size),
    ):
        if given is not None:
            raise ConfigError(
                f"{name}={given} is set but {other} is not, and no launcher provides it; set {other} as well"
            )
    return _SINGLE


def _read(env: Mapping[str, str], names: _Variables) -> LauncherEnvironment | None:
    """Read one launcher's variables; None if it has not started this process."""
    size = next((name for name in names.size if env.get(name)), None)
    if names.rank == "PMI_RANK" and slurm.started_by_srun(env):
        return None
    # A batch script, or a shell inside an allocation, also has numbers of SLURM's, although srun did not start it.
    if names.launcher == "slurm" and not (env.get(names.rank) and env.get("SLURM_STEP_ID")):
        return None
    if not env.get(names.rank):
        if size is None:
            return None
        raise ConfigError(f"{size}={env[size]} is set but {names.rank} is not; {_remedy(names)}")
    if size is None:
        missing = " or ".join(names.size)
        raise ConfigError(f"{names.rank}={env[names.rank]} is set but {missing} is not; {_remedy(names)}")
    local_rank = integer(env, names.local_rank) if env.get(names.local_rank) else None
    local_size = integer(env, names.local_size) if env.get(names.local_size) else None
    if names.launcher == "slurm":
        local_size = slurm.tasks_of_node(env)
    launcher = LauncherEnvironment(integer(env, names.rank), integer(env, size), local_rank, local_size, names.launcher)
    _check(launcher, names.rank, size, names.local_rank, names.local_size)
    return launcher


def _override(launcher: LauncherEnvironment, config: Config) -> LauncherEnvironment:
    given = {name: getattr(config, name) for name in ("rank", "size", "local_rank", "local_size")}
    changed = replace(launcher, **{name: value for name, value in given.items() if value is not None})
    _check(changed, "rank", "size", "local rank", "local size")
    return changed


def _remedy(names: _Variables) -> str:
    return f"set {names.rank} and {names.size[-1]} together, or XVCOMM_RANK and XVCOMM_SIZE, which take precedence"


def _check(launcher: LauncherEnvironment, rank: str, size: str, local_rank: str, local_size: str) -> None:
    """Refuse numbers that contradict each other; the arguments are the names of their variables."""
    advice = "give each process its own number, counted from 0"
    if launcher.size < 1:
        raise ConfigError(f"{size}={launcher.size}: a job has at least one rank")
    if not 0 <= launcher.rank < launcher.size:
        raise ConfigError(f"{rank}={launcher.rank} does not fit {size}={launcher.size}; {advice}")
    if launcher.local_size is not None and not 0 < launcher.local_size <= launcher.size:
        raise ConfigError(
            f"{local_size}={launcher.local_size} does not fit {size}={launcher.size}: a host has between 1 and all of the ranks"
        )
    if launcher.local_rank is not None and not 0 <= launcher.local_rank < (launcher.local_size or launcher.size):
        name, limit = (local_size, launcher.local_size) if launcher.local_size is not None else (size, launcher.size)
        raise ConfigError(f"{local_rank}={launcher.local_rank} does not fit {name}={limit}; {advice}")
