"""Rendezvous of a CuPy program, and assignment of GPUs."""

from __future__ import annotations

import os
import secrets
from importlib import import_module
from pathlib import Path

import xvcomm
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import ConfigError
from xvcomm.memory import vendors
from xvcomm.system.private import PrivateFolder

HOST, PORT = "127.0.0.1", 13333
_LOOPBACK = (HOST, "::1", "localhost")


def join(n_devices: int, rank: int, host: str, port: int, use_mpi: bool) -> Communicator:
    """Join with this rank; see `NCCLBackend`. The device is the type of `XVCOMM_DEVICE`, and CuPy's current one of it."""
    config = Config.from_env()
    device = config.device
    if device != "host":
        cupy = import_module("cupy")
        kind = device or vendors.kind_in(cupy)
        device = f"{kind}:{cupy.cuda.Device().id}"
    if use_mpi:
        return xvcomm.init(rank=rank, size=n_devices, device=device, store=import_module("mpi4py.MPI").COMM_WORLD)
    if config.store is not None:  # set by the launcher
        return xvcomm.init(rank=rank, size=n_devices, device=device)
    env = {**os.environ, "XVCOMM_SECRET": config.secret or _cookie(host)}
    return xvcomm.init(rank=rank, size=n_devices, device=device, store=f"tcp://{host}:{port}", env=env)


def _cookie(host: str) -> str:
    """A secret that only processes of this user can read: generated once, and stored in the home folder.

    Raises:
        ConfigError: ranks on other hosts may not have this home folder, or it cannot be used.
    """
    if host not in _LOOPBACK:
        raise ConfigError(
            f"a rendezvous at {host} needs the job's secret: set XVCOMM_SECRET to the same random text on all "
            "ranks, for instance the output of `openssl rand -hex 16`"
        )
    try:
        folder = PrivateFolder(Path.home() / ".cache" / "xvcomm")
        folder.make()
        if folder.read("secret") is None:
            folder.write("secret", secrets.token_hex(16).encode(), once=True)
        return (folder.read("secret") or b"").decode()
    except (OSError, RuntimeError) as error:  # RuntimeError: HOME is unset and the user database does not know the user
        raise ConfigError(
            f"the ranks' secret cannot be stored in the home folder: {error}; set XVCOMM_SECRET to the same random text on "
            "all ranks, for instance the output of `openssl rand -hex 16`"
        ) from error
