"""`xvcomm run`: starts the ranks of a job on this host, and ends them together."""

from __future__ import annotations

import enum
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from xvcomm.cli.launcher import FAILURE_GRACE, STOP_GRACE, Job, Outcome, RankSpec, signal_name
from xvcomm.cli.output import prefixes
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.rendezvous.store.hosting import loopback
from xvcomm.rendezvous.store.tcp import TcpServer
from xvcomm.types.topology import parse_islands

_GRACE_HELP = (
    f"Seconds from Ctrl-C or SIGTERM to SIGKILL; after a failure the others have {FAILURE_GRACE:g} s before SIGTERM."
)


class Replaceable(enum.StrEnum):
    """Backends of `torch.distributed` that xvcomm can replace."""

    NCCL = "nccl"
    GLOO = "gloo"


def run(
    command: Annotated[list[str], typer.Argument(help="Script, module (with -m) or program, and its arguments.")],
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = None,
    islands: Annotated[
        str | None, typer.Option(help="Island labels of the ranks, for instance cuda:2,rocm:2 (a rehearsal).")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a Python module, as python -m does.")] = False,
    replace: Annotated[
        Replaceable | None,
        typer.Option(help="Run PyTorch programs that use this backend of torch.distributed on xvcomm instead."),
    ] = None,
    prefix: Annotated[bool, typer.Option(help="Put the rank before each line of output.")] = True,
    grace: Annotated[float, typer.Option(min=0, help=_GRACE_HELP)] = STOP_GRACE,
) -> None:
    """Run a job: N ranks on this host, merged output, one exit code.

    Without -n, --islands determines the number of ranks; without both there is one rank per core. The first rank that fails
    ends the others; its last lines are printed last and its exit code is the command's.
    """
    labels = rank_labels(ranks, islands)
    argv = resolve(command, module)
    extra = {} if replace is None else {"XVCOMM_REPLACE": replace.value}
    raise typer.Exit(launch(argv, labels, prefix=prefix, grace=grace, extra=extra))


def rank_labels(ranks: int | None, islands: str | None) -> tuple[str, ...]:
    """A label for each rank; empty labels without islands.

    Raises:
        ArgumentError: `ranks` and `islands` do not agree.
    """
    if islands is None:
        return ("",) * (ranks or len(os.sched_getaffinity(0)))
    labels = parse_islands(islands)
    if ranks is not None and ranks != len(labels):
        raise ArgumentError(
            f"-n {ranks} does not agree with --islands {islands}, which has {len(labels)} ranks; drop -n"
        )
    return labels


def resolve(command: Sequence[str], module: bool) -> tuple[str, ...]:
    """The command line to execute: Python for a `.py` script or a module, otherwise the program itself.

    Raises:
        ArgumentError: the script or program does not exist.
    """
    if command[0] == "-m" and len(command) > 1:
        module, command = True, command[1:]
    python = (sys.executable, "-u")
    if module:
        return (*python, "-m", *command)
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise ArgumentError(f"no such script: {command[0]} (in {Path.cwd()})")
        return (*python, *command)
    if shutil.which(command[0]) is None:
        raise ArgumentError(f"no such program: {command[0]}; scripts end in .py, modules need -m")
    return tuple(command)


def launch(
    argv: Sequence[str], labels: Sequence[str], *, prefix: bool = True, grace: float = STOP_GRACE,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Run `argv` once for each label, including the store and the removal of shared memory files; blocks.

    Args:
        argv: the command line.
        labels: an island label for each rank, or an empty text.
        prefix: whether output lines are prefixed with their rank.
        grace: seconds between the request to end and SIGKILL.
        extra: additional variables for all ranks.

    Returns:
        Exit code of the command.

    Raises:
        ResourceError: a rank cannot be started.
        StoreError: the store's port is not available.
    """
    with job_environment() as common:
        envs = rank_environments({**terminal_environment(labels, prefix), **common, **extra}, labels)
        specs = [RankSpec(label, tuple(argv), env) for label, env in zip(labels, envs, strict=True)]
        with Job(specs, prefix=prefix, grace=grace) as running:
            outcome = running.run()
        _report(running, outcome)
    return outcome.code


@contextmanager
def job_environment() -> Iterator[dict[str, str]]:
    """Environment that all ranks of a new job share: this process's, and address, secret and name of the job, whose store it
    serves.

    Leaving it closes the store, and removes shared memory files that killed ranks left.

    Raises:
        StoreError: the store's port is not available.
        ConfigError: a variable is invalid.
    """
    folder = Path(Config.from_env().shm_dir)
    secret, job = secrets.token_hex(16), f"{os.environ.get('XVCOMM_JOB') or os.getpid()}-{secrets.token_hex(4)}"
    server = TcpServer(loopback(), 0, secret)
    try:
        yield {
            **os.environ,
            "XVCOMM_STORE": f"{server.address}?hosted=launcher",
            "XVCOMM_SECRET": secret,
            "XVCOMM_JOB": job,
        }
    finally:
        server.close()
        for file in folder.glob(f"xvcomm-{job}-*"):
            file.unlink(missing_ok=True)


def rank_environments(common: Mapping[str, str], labels: Sequence[str]) -> Iterator[dict[str, str]]:
    """Environment of each rank: xvcomm's variables, and torchrun's, so that torch.distributed works as well."""
    size, local = str(len(labels)), loopback()
    shared = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // len(labels))),
        **common,
        "XVCOMM_SIZE": size,
        "XVCOMM_LOCAL_SIZE": size,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": local,
        "MASTER_PORT": str(_free_port(local)),
    }
    for number, label in enumerate(labels):
        rank = str(number)
        env = {**shared, "XVCOMM_RANK": rank, "XVCOMM_LOCAL_RANK": rank, "RANK": rank, "LOCAL_RANK": rank}
        if label:
            env["XVCOMM_ISLAND"] = label
        if number > 0:
            env.setdefault("TTY_INTERACTIVE", "0")  # one progress bar is enough
        yield env


def terminal_environment(labels: Sequence[str], prefix: bool) -> dict[str, str]:
    """Variables that make programs based on rich format for a terminal although they write to a pipe; empty
    without a terminal.
    """
    if not (os.isatty(1) and os.isatty(2)):
        return {}
    taken = len(prefixes(labels, colour=False)[0]) if prefix else 0
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(20, shutil.get_terminal_size().columns - taken - 1))}


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _report(job: Job, outcome: Outcome) -> None:
    """Print the reason of a failure to stderr, after all other output."""
    if outcome.signal is not None:
        print(f"xvcomm run: ended by {signal_name(outcome.signal)}", file=sys.stderr)
    elif outcome.rank is not None:
        words = "its last lines:" if outcome.last_words else "it wrote nothing"
        print(
            f"{'-' * 80}\nxvcomm run: failed because {job.describe(outcome.rank)}; {words}", file=sys.stderr, flush=True
        )
        sys.stderr.buffer.write(b"".join(line + b"\n" for line in outcome.last_words))
        sys.stderr.flush()
