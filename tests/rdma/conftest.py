"""Fixtures of the tests of RDMA: the fake provider, and for two hosts with RDMA devices that run a test at the same time, each as
HOST_INDEX.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SHIM, RXE = (Path(__file__).resolve().parents[1] / "shims" / name for name in ("verbs", "rxe"))
sys.path[:0] = [str(Path(__file__).parent), str(SHIM)]  # for the modules beside this one, and the fake provider's

ME, PORT, SECONDS = int(os.environ.get("HOST_INDEX", "-1")), 7000, 180


def pytest_collection_modifyitems(items):
    """Skip the tests elsewhere."""
    if ME < 0:
        for item in items:
            if item.get_closest_marker("rdma"):
                item.add_marker(pytest.mark.skip(reason="no two hosts with RDMA devices here: make test-rdma"))


class OtherHost:
    """A connection to the same test on the other host, for what queue pairs need before they work.

    Attributes:
        index: of this host.
        nics: how many each host has.
    """

    def __init__(self, connection):
        self.index, self.nics = ME, int(os.environ["NIC_COUNT"])
        self._file = connection.makefile("rwb")

    def swap(self, value=None):
        """Give a value to the other host for its own; both wait for each other here."""
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def address(self, host, nic):
        """IPv4 address of a NIC."""
        return os.environ[f"HOST_ADDR_{host}_{nic}"]

    def close(self):
        """Close the connection."""
        self._file.close()


def _connection():
    """Host 0 listens, host 1 connects as soon as it does."""
    address = os.environ["HOST_ADDR_0_0"], PORT
    if ME == 0:
        with socket.create_server(address) as listener:
            listener.settimeout(SECONDS)
            return listener.accept()[0]
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(address, timeout=SECONDS)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@pytest.fixture
def other_host():
    """The other host, where the same test has begun."""
    with _connection() as connection:
        connection.settimeout(SECONDS)
        host = OtherHost(connection)
        yield host
        host.close()


@pytest.fixture(scope="session")
def shim():
    """Folder of the fake provider."""
    return SHIM


@pytest.fixture(scope="session")
def fake_verbs(tmp_path_factory):
    """The fake provider, compiled."""
    from fabric import NoCompiler, build

    try:
        return build(tmp_path_factory.mktemp("verbs"))
    except NoCompiler as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """A function that names a new file at each call."""
    folder, numbers = tmp_path_factory.mktemp("fabrics"), itertools.count()
    return lambda: folder / str(next(numbers))


@pytest.fixture
def make(fake_verbs, fresh):
    """A function that makes two networks over the fake provider, and a ring between them: see `registered.make`."""
    import registered

    with contextlib.ExitStack() as stack:
        yield lambda **how: registered.make(stack, fake_verbs, fresh(), **how)


def load(name):
    """A module of the shim of hosts; `hosts` imports `build` by its bare name."""
    found = importlib.util.spec_from_file_location(name, RXE / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture
def start(monkeypatch):
    """A function that starts a command on two hosts; for tests that run on neither of them."""
    for name in ("build", "hosts"):  # restored afterwards, as they were
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    built = load("build").kept()
    if built is None:
        pytest.skip("the hosts are not built here: make test-rdma")
    hosts = load("hosts")
    return lambda *command, **options: hosts.Hosts(built, command, **options)
