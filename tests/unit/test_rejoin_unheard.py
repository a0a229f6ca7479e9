"""A process that wants to join a job that runs, whose store's host is out of reach."""

from __future__ import annotations

import pytest

from xvcomm.comm.growing import rejoin
from xvcomm.config import Config
from xvcomm.errors import StoreError
from xvcomm.rendezvous.store import TcpServer, TcpStore
from xvcomm.types.deadline import Deadline


def test_it_does_not_wait_for_the_deadline(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TcpStore("127.0.0.1", server.port, "secret", Deadline.after(60))
    monkeypatch.setattr(TcpStore, "unheard", lambda self: 60.0)
    with pytest.raises(StoreError, match=r"was lost during|cannot be reached"):
        rejoin(store, 1, Config(peer_timeout=2.0), Deadline.after(30), store.close)
    store.close()
