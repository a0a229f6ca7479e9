"""A TCP store that takes no more connections: its process is out of file descriptors, or its host's queue is full."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.rendezvous.store import TcpStore
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
FULL = """
import os, resource, sys, time
from xvcomm.rendezvous.store import TcpServer, listening
listening._BACKLOG = 0
server = TcpServer("127.0.0.1", 0, "secret")
print(server.port, flush=True)
sys.stdin.readline()  # a client is connected by now
held, highest = [os.dup(0)], max(map(int, os.listdir("/proc/self/fd")))
while held[-1] < highest:
    held.append(os.dup(0))  # no number below is free
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, held[-1] + 1))
print("full", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("waiting", [0, 4], ids=["out of file descriptors", "its queue is full, too"])
def test_a_store_that_takes_no_more_connections(waiting: int) -> None:
    """A rank that has a connection goes on; one that needs another, or its first one, gets an error at its deadline."""
    with contextlib.ExitStack() as steps:
        serving = subprocess.Popen([sys.executable, "-c", FULL], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        steps.enter_context(serving)
        steps.callback(serving.kill)
        assert serving.stdin is not None and serving.stdout is not None
        port = int(serving.stdout.readline())
        store = steps.enter_context(contextlib.closing(TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))))
        store.set("k", b"1")
        serving.stdin.write(b"\n")
        serving.stdin.flush()
        assert serving.stdout.readline() == b"full\n"
        for _ in range(waiting):
            other = steps.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        with pytest.raises(StoreError, match=rf"no store answers at 127.0.0.1:{port} \(.*timed out"):
            TcpStore("127.0.0.1", port, "secret", Deadline.after(0.2))
        assert store.get("k", Deadline.after(SOON)) == b"1"
        store.notices("deaths", b"will")  # keeps the connection
        with pytest.raises(DeadlineExceeded, match=f":{port} took no connection for set 'k' .*out of file descriptors"):
            store.set("k", b"2", Deadline.after(0.1))
