"""`xvcomm run`: starts the ranks of a job on this host, or its part of them, and ends them together."""

from __future__ import annotations

import enum
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from xvcomm.cli.ending import Outcome
from xvcomm.cli.launcher import FAILURE_GRACE, STOP_GRACE, Job
from xvcomm.cli.nodes import Nodes, Place, join
from xvcomm.cli.output import prefixes
from xvcomm.cli.rank_process import RankSpec, signal_name
from xvcomm.config import Config
from xvcomm.errors import ArgumentError
from xvcomm.rendezvous import returning
from xvcomm.rendezvous.store import StoreAddress, TcpStore
from xvcomm.rendezvous.store.hosting import loopback
from xvcomm.rendezvous.store.tcp import TcpServer
from xvcomm.types.deadline import Deadline
from xvcomm.types.topology import parse_islands

_ANSWER_SECONDS = 5.0
_GRACE_HELP = (
    f"Seconds from Ctrl-C or SIGTERM to SIGKILL; after a failure the others have {FAILURE_GRACE:g} s before SIGTERM."
)


class Replaceable(enum.StrEnum):
    """Backends of `torch.distributed` that xvcomm can replace."""

    NCCL = "nccl"
    GLOO = "gloo"


def run(
    command: Annotated[list[str], typer.Argument(help="Script, module (with -m) or program, and its arguments.")],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", "--nproc-per-node", min=1, help="Number of ranks on this host.")
    ] = None,
    islands: Annotated[
        str | None,
        typer.Option(help="Island labels of this host's ranks, or of all, for instance cuda:2,rocm:2 (a rehearsal)."),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts on which this command is started.")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Number of this host, counted from 0.")] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Host 0, and a free port there; 29500 if left out.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a Python module, as python -m does.")] = False,
    replace: Annotated[
        Replaceable | None,
        typer.Option(help="Run PyTorch programs that use this backend of torch.distributed on xvcomm instead."),
    ] = None,
    prefix: Annotated[bool, typer.Option(help="Put the rank before each line of output.")] = True,
    grace: Annotated[float, typer.Option(min=0, help=_GRACE_HELP)] = STOP_GRACE,
    survive: Annotated[
        bool,
        typer.Option(
            "--survive", help="Let the other ranks go on when one fails, by Communicator.shrink. One host only."
        ),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="With --survive, start each rank that fails again, so often; it joins by Communicator.grow."
        ),
    ] = 0,
) -> None:
    """Run a job: N ranks on this host, merged output, one exit code.

    Without -n, --islands determines the number of ranks; without both there is one rank per core. The first rank that fails
    ends the others; its last lines are printed last and its exit code is the command's. With --survive the others go on, and the
    command succeeds if one of them does. With --max-restarts ranks that fail are started again, and join the others when these
    grow.

    A job on several hosts is started on each of them, by the same command but for --node-rank and -n.
    """
    if max_restarts and not survive:
        raise ArgumentError(
            "--max-restarts needs --survive: the other ranks go on meanwhile, and take the rank in again"
        )
    place = Place.parse(nnodes, node_rank, master)
    extra = {} if replace is None else {"XVCOMM_REPLACE": replace.value}
    if place is None:
        labels = rank_labels(ranks, islands)
        argv = resolve(command, module)
        code = launch(argv, labels, prefix=prefix, grace=grace, extra=extra, survive=survive, restarts=max_restarts)
        raise typer.Exit(code)
    if survive:
        raise ArgumentError("--survive works on one host only; drop it, or start the ranks without xvcomm run")
    argv, labels = resolve(command, module), () if islands is None else parse_islands(islands)
    count = ranks or len(rank_labels(None, islands))
    with join(place, count, labels, grace) as nodes:
        code = launch(argv, nodes.labels, prefix=prefix, grace=grace, extra=extra, nodes=nodes)
    raise typer.Exit(code)


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
    extra: Mapping[str, str] = MappingProxyType({}), nodes: Nodes | None = None, survive: bool = False,
    restarts: int = 0,
) -> int:  # fmt: skip
    """Run `argv` once for each label, including the store and the removal of shared memory files; blocks.

    Args:
        argv: the command line.
        labels: an island label for each rank, or an empty text.
        prefix: whether output lines are prefixed with their rank.
        grace: seconds between the request to end and SIGKILL.
        extra: additional variables for all ranks.
        nodes: the launchers of the job's other hosts.
        survive: whether the other ranks go on when one fails.
        restarts: how often each rank that fails is started again meanwhile.

    Returns:
        Exit code of the command.

    Raises:
        ResourceError: a rank cannot be started.
        StoreError: the store's port is not available.
    """
    first, size = (0, len(labels)) if nodes is None else (nodes.first, nodes.size)
    with job_environment() if nodes is None else member_environment(nodes.variables) as common:
        common = {**terminal_environment(labels, prefix), **common, **extra}
        envs = rank_environments(common, labels, first, size)
        specs = [RankSpec(label, tuple(argv), env) for label, env in zip(labels, envs, strict=True)]
        with _returned(common) as returned, Job(
            specs, prefix=prefix, grace=grace, first=first, others=nodes, survive=survive, restarts=restarts,
            returned=returned,
        ) as running:  # fmt: skip
            outcome = running.run()
        _report(outcome)
    return outcome.code


@contextmanager
def job_environment() -> Iterator[dict[str, str]]:
    """Environment that all ranks of a new job on this host share, see `member_environment`; serves the job's store.

    Raises:
        StoreError: the store's port is not available.
        ConfigError: a variable is invalid.
    """
    secret, local = secrets.token_hex(16), loopback()
    server = TcpServer(local, 0, secret)
    variables = {
        "XVCOMM_STORE": f"{server.address}?hosted=launcher",
        "XVCOMM_SECRET": secret,
        "MASTER_ADDR": local,
        "MASTER_PORT": str(free_port(local)),
    }
    try:
        with member_environment(variables) as common:
            yield common
    finally:
        server.close()


@contextmanager
def _returned(variables: Mapping[str, str]) -> Iterator[Callable[[int], int]]:
    """How many of the processes that were started again as a rank have joined the job that this launcher serves."""
    opened: list[TcpStore] = []

    def returned(rank: int) -> int:
        if not opened:
            address = StoreAddress.parse(variables["XVCOMM_STORE"])
            opened.append(
                TcpStore(address.host, address.port, variables["XVCOMM_SECRET"], Deadline.after(_ANSWER_SECONDS))
            )
        return returning.told(opened[0], rank, Deadline.after(_ANSWER_SECONDS))

    try:
        yield returned
    finally:
        for store in opened:
            store.close()


@contextmanager
def member_environment(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Environment that this host's ranks of a job share: this process's, `variables`, and a name for shared memory files.

    Not `XVCOMM_REJOIN`, which concerns the job of which this process is a rank, if it is one. Leaving it removes such files that
    killed ranks left.
    """
    folder = Path(Config.from_env().shm_dir)
    job = f"{os.environ.get('XVCOMM_JOB') or os.getpid()}-{secrets.token_hex(4)}"
    try:
        inherited = {name: value for name, value in os.environ.items() if name != "XVCOMM_REJOIN"}
        yield {**inherited, **variables, "XVCOMM_JOB": job}
    finally:
        for file in folder.glob(f"xvcomm-{job}-*"):
            file.unlink(missing_ok=True)


def rank_environments(
    common: Mapping[str, str], labels: Sequence[str], first: int, size: int
) -> Iterator[dict[str, str]]:
    """Environment of each rank of this host: xvcomm's variables, and torchrun's, so that torch.distributed works as well.

    Args:
        common: what they share.
        labels: of their islands.
        first: rank of the first of them.
        size: number of ranks of the job.
    """
    local_size = str(len(labels))
    shared = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // len(labels))),
        **common,
        "XVCOMM_SIZE": str(size),
        "XVCOMM_LOCAL_SIZE": local_size,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": local_size,
    }
    for number, label in enumerate(labels):
        rank, local = str(first + number), str(number)
        env = {**shared, "XVCOMM_RANK": rank, "XVCOMM_LOCAL_RANK": local, "RANK": rank, "LOCAL_RANK": local}
        if label:
            env["XVCOMM_ISLAND"] = label
        if first + number > 0:
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


def free_port(host: str) -> int:
    """A port of an address that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _report(outcome: Outcome) -> None:
    """Print the reason of a failure to stderr, after all other output."""
    if outcome.signal is not None:
        print(f"xvcomm run: ended by {signal_name(outcome.signal)}", file=sys.stderr)
    elif outcome.code:
        words = outcome.last_words
        tail = "" if words is None else "; its last lines:" if words else "; it wrote nothing"
        print(f"{'-' * 80}\nxvcomm run: failed because {outcome.reason}{tail}", file=sys.stderr, flush=True)
        sys.stderr.buffer.write(b"".join(line + b"\n" for line in words or ()))
        sys.stderr.flush()
