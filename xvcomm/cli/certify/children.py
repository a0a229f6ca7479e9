"""Jobs that sections start for themselves: a process beside each of some ranks, of which one may die without harm."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xvcomm.cli.certify.control import Control
from xvcomm.cli.certify.job import Job
from xvcomm.cli.run import free_port
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.rendezvous.store.hosting import loopback, own_address
from xvcomm.rendezvous.store.server import TcpServer

_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "JAX_",
    "TORCHELASTIC_",
)
"""Beginnings of the names of launchers' variables, which the processes must not take for their own."""

_OWN = ("XVCOMM_METRICS", "XVCOMM_TRACE_DIR", "XVCOMM_PORTS")
"""What only one process of a rank can have."""

MOST_SECONDS = 120.0
"""After which a job of its own hangs; most take a sixth of it, also where the section has less time."""

_TAIL = 12


@dataclass
class Outcome:
    """What became of one process.

    Attributes:
        rank: of the rank that started it, in the certificate's job.
        code: exit code; negative for a signal, None if it had to be killed for its time was over.
        result: what it wrote, which may be of the time before its end.
        tail: its last lines of output.
    """

    rank: int
    code: int | None
    result: list[dict[str, Any]]
    tail: str


def run_children(comm: Communicator, control: Control, job: Job, what: str, seconds: float) -> list[Outcome]:
    """Run a job of a process beside each rank of `job.children`, in rank order; every rank calls this.

    Args:
        what: of the job, a name that `child` knows.
        seconds: after which its processes are killed.

    Returns:
        The outcomes, in rank order, on rank 0; elsewhere nothing.
    """
    server, variables = None, None
    if comm.rank == 0:
        host, secret = loopback() if job.machines == 1 else own_address(), secrets.token_hex(16)
        server = TcpServer(host, 0, secret)
        variables = {
            "XVCOMM_STORE": f"{server.address}?hosted=launcher", "XVCOMM_SECRET": secret,
            "MASTER_ADDR": host, "MASTER_PORT": str(free_port(host)),
            "XVCOMM_JOB": f"{Config.from_env(os.environ).job or os.getpid()}-{secrets.token_hex(4)}",
        }  # fmt: skip
    try:
        shared: dict[str, str] = control.say(variables)
        note = None
        if comm.rank in job.children:
            note = asdict(_child(comm, job, what, shared, seconds))
        count = control.meet(note, seconds)
        return [Outcome(**found) for _, found in control.notes(count)]
    finally:
        if server is not None:
            server.close()


def _child(comm: Communicator, job: Job, what: str, shared: dict[str, str], seconds: float) -> Outcome:
    """Run this rank's process to its end."""
    number, config = job.children.index(comm.rank), Config.from_env(os.environ)
    # Which of them share a host is for the library to find out; a rank of each host has to be the first there.
    place = {"XVCOMM_RANK": number, "XVCOMM_SIZE": len(job.children), "XVCOMM_LOCAL_RANK": number,
             "XVCOMM_LOCAL_SIZE": len(job.children), "RANK": number, "WORLD_SIZE": len(job.children)}  # fmt: skip
    device = {"XVCOMM_DEVICE": comm.device, "XVCOMM_TIMEOUT": "30", "OMP_NUM_THREADS": "1"}
    if comm.device != "host":
        device["XVCOMM_DEVICE_INDEX"] = str(comm.device_index)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _OWN}
    env = {**kept, **shared, **device, **{name: str(value) for name, value in place.items()}}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder, "result.json"), Path(folder, "output")
        command = [sys.executable, "-m", "xvcomm.cli.certify.child", what, str(file)]
        with (
            output.open("wb") as out,
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out) as process,
        ):
            code = _wait(process, seconds)
        for left in Path(config.shm_dir).glob(f"xvcomm-{shared['XVCOMM_JOB']}-*"):
            if code is None:  # a job that ends removes its own
                left.unlink(missing_ok=True)
        result = json.loads(file.read_text()) if file.exists() else []
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL:])
    return Outcome(comm.rank, code, result, tail)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None if the process was killed because its time was over."""
    until = time.monotonic() + seconds
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
