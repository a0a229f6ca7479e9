"""Torch jobs for tests: rank processes with a default group that are kept between calls.

Like `xvcomm.testing.world.World`, but plain torch programs: ranks connect as under torchrun, and the functions called
on them only use `torch.distributed`. The variable TORCH_BACKEND runs the same tests on another backend, for example gloo.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import MappingProxyType

from xvcomm.testing.processes import Ranks, obey, prepare
from xvcomm.testing.servers import forked_with
from xvcomm.types.topology import parse_islands

BACKEND = os.environ.get("TORCH_BACKEND", "xvcomm")
TIMEOUT = 30.0
_GRACE_SECONDS = 5.0
_PRELOAD = [
    "pytest", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.distributed.optim", "torch.nn.parallel",
    "torch.distributed.nn.functional", "xvcomm.comm.communicator", "xvcomm.comm.init", "xvcomm.backends.host",
    "xvcomm.backends.host.collective", "xvcomm.backends.host.device", "torchjobs", "torchchecks",
]  # fmt: skip


class Job(Ranks):
    """Ranks of one torch job on this machine, each in its own process with an initialised default group.

    Functions run on the ranks as `function(*args)`; they must be top-level functions of a test file, and arguments and
    results must be picklable.

    Args:
        islands: labels of the ranks, `"cuda:2,rocm:2"`: a rehearsal.
        backend: argument of `init_process_group`; with None no default group is created.
        env: additional variables of the ranks; or a sequence of them, one per rank.
        timeout: of the default group, in seconds.
    """

    def __init__(
        self, islands: str, backend: str | None = BACKEND, *,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}), timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        super().__init__(forked_with(_PRELOAD), _GRACE_SECONDS)
        labels = parse_islands(islands)
        further = [env] * len(labels) if isinstance(env, Mapping) else env
        port = self._serve(_serve_store)
        each = []
        for rank, label in enumerate(labels):
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(len(labels)), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(len(labels)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "XVCOMM_DEVICE": "host",
                "XVCOMM_ISLAND": label, **further[rank],
            }  # fmt: skip
            each.append((variables, list(sys.path), backend, timeout))
        self._start(_rank_main, each)


def _serve_store(pipe: Connection) -> None:
    """The job's store, as in torchrun's agent: in a separate process that outlives all ranks."""
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


def _rank_main(
    pipe: Connection, variables: dict[str, str], path: list[str], backend: str | None, timeout: float
) -> None:
    """Main function of a rank's process."""
    import torch
    import torch.distributed as dist

    prepare(variables, path)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()

    def join() -> tuple[()]:
        if backend is not None:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        return ()

    if obey(pipe, join) is not None and dist.is_initialized():
        dist.destroy_process_group()


def launch(*command: str, env: Mapping[str, str] = MappingProxyType({}), timeout: float = 100.0) -> str:
    """Output of a program that must succeed; it runs in its own session, which is killed if it hangs.

    Args:
        env: additional variables; those of xvcomm and of launchers are removed first.
    """
    foreign = ("XVCOMM_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables |= {"XVCOMM_DEVICE": "host", "OMP_NUM_THREADS": "1", **env}
    process = subprocess.Popen(
        command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} hangs:\n{out}") from None
    assert process.returncode == 0, out
    return out
