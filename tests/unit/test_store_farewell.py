"""How long a closing server serves those that have not closed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from xvcomm.rendezvous.store import TcpServer, TcpStore
from xvcomm.system.processes import own, stopped
from xvcomm.types.deadline import Deadline

SOON, LONG = 15.0, 60.0
CLIENT = """
import sys
from xvcomm.types.deadline import Deadline
from xvcomm.rendezvous.store import TcpStore
store = TcpStore("127.0.0.1", int(sys.argv[1]), "secret", Deadline.after(20))
print("joined", flush=True)
sys.stdin.readline()
store.set("late", b"1", Deadline.after(20))
print("set", flush=True)
"""


@pytest.fixture
def server() -> Iterator[TcpServer]:
    server = TcpServer("127.0.0.1", 0, "secret")
    yield server
    server.close()


@pytest.fixture
def client(server: TcpServer) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CLIENT, str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
        yield process
        process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_detection_of_stopped_processes(client: subprocess.Popen[str]) -> None:
    where = own().rpartition(" ")[0]
    assert not stopped(own()) and not stopped(f"{where} {client.pid}")
    stop(client)
    assert stopped(f"{where} {client.pid}")
    assert not stopped(f"elsewhere {client.pid}") and not stopped(f"{where} {'9' * 300}") and not stopped("")


def test_stopped_clients_are_not_waited_for(server: TcpServer, client: subprocess.Popen[str]) -> None:
    stop(client)
    began = time.monotonic()
    server.close(LONG)
    assert time.monotonic() - began < SOON


def test_quiet_clients_are_waited_for(server: TcpServer, client: subprocess.Popen[str]) -> None:
    """One that is stopped does not end it for one that computes, and may still need the store."""
    another = TcpStore("127.0.0.1", server.port, "secret", Deadline.after(SOON))
    stop(client)
    closing = threading.Thread(target=server.close, args=(LONG,))
    closing.start()
    closing.join(2.5)
    assert closing.is_alive()
    another.set("late", b"2", Deadline.after(SOON))
    another.close()
    closing.join(SOON)
    assert not closing.is_alive()
