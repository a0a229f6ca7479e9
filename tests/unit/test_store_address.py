"""Values of XVCOMM_STORE."""

from __future__ import annotations

from pathlib import Path

import pytest

from xvcomm.errors import ConfigError
from xvcomm.rendezvous.store import FileStore, StoreAddress, TcpServer, TcpStore, open_store
from xvcomm.types.deadline import NEVER, Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0


def test_forms() -> None:
    assert StoreAddress.parse("tcp://h:5") == StoreAddress("h", 5)
    assert StoreAddress.parse("tcp://[::1]:5?hosted=launcher") == StoreAddress("::1", 5, hosted=True)
    assert StoreAddress.parse("file:///a%20b/c") == StoreAddress(folder=Path("/a b/c"))


@pytest.mark.parametrize(
    "text",
    ["", "h:5", "tcp://h", "tcp://:5", "tcp://h:x", "tcp://h:99999", "tcp://h:5/x", "tcp://h:5?hosted=me",
     "tcp://h:5?x=1", "file://host/x", "file:///", "http://h:5"],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="XVCOMM_STORE"):
        StoreAddress.parse(text)


def test_open_store(server: TcpServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
        open_store(server.address, None, NEVER)
    store = open_store(server.address, "secret", Deadline.after(SOON))
    assert isinstance(store, TcpStore)
    store.close()
    assert isinstance(open_store(f"file://{tmp_path}", None, NEVER), FileStore)
