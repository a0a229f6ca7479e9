"""A rank dies after it has joined and before all have: those that wait learn of it."""

import socket
import time

import pytest
from stores import KINDS

import xvcomm
from xvcomm.errors import PeerLost
from xvcomm.rendezvous.store import FileStore, TcpServer, TcpStore
from xvcomm.testing.world import World
from xvcomm.types.deadline import Deadline

SECRET = "of this test"
SOON = 15.0
JOINED = "xvcomm/0/1/join/info/1"
"""The key of what rank 1 tells the others."""


def join(comm, env):
    """Join another job than the process's own."""
    xvcomm.init(env=env).close()


@pytest.fixture(params=KINDS)
def meeting(request, tmp_path):
    """The address of a store, and a function that opens it."""
    if request.param == "file":
        folder = tmp_path / "store"
        folder.mkdir(mode=0o700)
        yield f"file://{folder}", lambda: FileStore(folder / "0")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = TcpServer("127.0.0.1", port, SECRET) if request.param == "launcher" else None
    hosted = "?hosted=launcher" if server is not None else ""
    yield (
        f"tcp://127.0.0.1:{port}{hosted}",
        lambda: TcpStore("127.0.0.1", port, SECRET, Deadline.after(SOON), epoch=None),
    )
    if server is not None:
        server.close()


@pytest.mark.parametrize("late", [False, True], ids=["never comes", "comes later"])
def test_killed_while_others_have_not_joined(meeting, late):
    """Also a rank that comes later learns of it."""
    address, opened = meeting
    with World(3) as world:
        pid = world.pids()[1]
        envs = [
            {
                "XVCOMM_RANK": str(rank), "XVCOMM_SIZE": "3", "XVCOMM_STORE": address, "XVCOMM_SECRET": SECRET,
                "XVCOMM_TIMEOUT": "60", "XVCOMM_HOST": "" if address.startswith("file") else f"host {rank}",
            }
            for rank in range(3)
        ]  # fmt: skip
        for rank in range(2):
            world.submit(rank, join, envs[rank])
        store = opened()
        store.wait([JOINED], Deadline.after(SOON))
        store.close()
        begun = time.monotonic()
        world.kill(1)
        assert isinstance(world.collect(1)[0], EOFError)
        if late:
            world.submit(2, join, envs[2])
        lost = [world.collect(rank)[0] for rank in ((0, 2) if late else (0,))]
        for error in lost:
            assert isinstance(error, PeerLost) and error.peer == 1, error
            assert f"rank 1 (process {pid} on" in str(error) and "ended before all ranks had joined" in str(error)
        assert time.monotonic() - begun < SOON
