"""Fixtures of the tests of stores and of `init`: a port, a server, clients of every kind of store."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import settings

from xvcomm.abc.store import Store
from xvcomm.comm import store_parts
from xvcomm.rendezvous.store import FileStore, MemoryStore, TcpServer, TcpStore
from xvcomm.rendezvous.store.wrappers import TorchStore
from xvcomm.types.deadline import Deadline

# Two test runs share the machine: how long an example takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

SOON = 60.0


@pytest.fixture
def no_store_thread_left() -> Iterator[None]:
    """Check that every server and client of the test has stopped its threads."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("xvcomm-store")] == []


@pytest.fixture
def port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def address(port: int) -> str:
    """An address for a store server, in the format of `XVCOMM_STORE`."""
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture
def server() -> Iterator[TcpServer]:
    """A server of a store whose secret is "secret"."""
    server = TcpServer("127.0.0.1", 0, "secret")
    yield server
    server.close()


@pytest.fixture(params=["memory", "file", "tcp", "torch"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens another client of one store of each kind."""
    opened: list[Store] = []

    def keep(store: Store) -> Store:
        opened.append(store)
        return store

    if request.param == "memory":
        memory = MemoryStore()
        yield lambda: memory
    elif request.param == "file":
        yield lambda: keep(FileStore(tmp_path / "store"))
    elif request.param == "tcp":
        tcp = request.getfixturevalue("server")
        yield lambda: keep(TcpStore("127.0.0.1", tcp.port, "secret", Deadline.after(SOON)))
    else:
        distributed = pytest.importorskip("torch.distributed")
        master = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, patience = master.port, timedelta(seconds=SOON)
        yield lambda: TorchStore(distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=patience))
    for store in opened:
        store.close()


@pytest.fixture
def fake_communicator(monkeypatch: pytest.MonkeyPatch, no_store_thread_left: None) -> Path:
    """Make `init()` use the fake communicator, without settings or earlier epochs; returns the fake's file."""
    monkeypatch.setitem(sys.modules, "xvcomm.comm.communicator", types.ModuleType("xvcomm.comm.communicator"))
    file = Path(__file__).with_name("fake_communicator.py")
    runpy.run_path(str(file))
    monkeypatch.setattr(store_parts, "_epochs", type(store_parts._epochs)())
    for name in [name for name in os.environ if name.startswith("XVCOMM_")]:
        monkeypatch.delenv(name)
    return file
