"""Rank 0 serves the store and tells the others where."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from xvcomm.errors import AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.store import MemoryStore, TcpServer
from xvcomm.rendezvous.store.hosting import Invitation, invite, meet, own_address, serve_or_join
from xvcomm.types.deadline import NEVER, Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0


def test_ranks_meet_through_a_bootstrap_store() -> None:
    bootstrap = MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, bootstrap, rank, "127.0.0.1", Deadline.after(SOON)) for rank in (1, 2)]
        stores = [meet(bootstrap, 0, "127.0.0.1", Deadline.after(SOON)), *(other.result(SOON) for other in others)]
        stores[2].set("k", b"1")
        assert stores[1].get("k", Deadline.after(SOON)) == b"1"
        closing = pool.submit(stores[0].close)
        stores[1].set("k", b"2")
        stores[1].close()
        assert stores[2].get("k", Deadline.after(SOON)) == b"2"
        stores[2].close()
        closing.result(SOON)


def test_rank_0_never_comes(port: int) -> None:
    with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
        meet(MemoryStore(), 1, "127.0.0.1", Deadline.after(0.05))
    with pytest.raises(DeadlineExceeded, match=f"rank 0 has not joined.*127.0.0.1:{port}"):
        serve_or_join("127.0.0.1", port, "secret", 1, Deadline.after(0.05), 0)


def test_another_program_has_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StoreError, match=f"port {port} .*in use"):
            serve_or_join("127.0.0.1", port, "secret", 0, Deadline.after(0.2), 0)


def test_another_job_has_the_port(server: TcpServer) -> None:
    with pytest.raises(StoreError, match=f"port {server.port} .*in use"):
        serve_or_join("127.0.0.1", server.port, "other", 0, Deadline.after(SOON), 0)


def test_an_invitation_of_another_version() -> None:
    assert Invitation.unpack(Invitation("h", 1, "s").pack()) == Invitation("h", 1, "s")
    with pytest.raises(StoreError, match="another version"):
        Invitation.unpack(b'{"where":"h:1"}')


def test_a_bootstrap_store_that_fails_leaves_no_server() -> None:
    class Broken(MemoryStore):
        def set(self, key: str, value: bytes, deadline: Deadline = NEVER) -> None:
            raise StoreError("broken")

    with pytest.raises(StoreError, match="broken"):
        meet(Broken(), 0, "127.0.0.1", Deadline.after(SOON))


def test_own_address_is_reachable() -> None:
    try:
        host = own_address()
    except StoreError as error:
        assert "XVCOMM_STORE" in str(error)
        return
    store, invitation = invite(host, Deadline.after(SOON))
    assert invitation.host == host
    store.close()


def test_a_secret_that_is_set_is_used_and_told_to_nobody() -> None:
    bootstrap = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(meet, bootstrap, 0, "127.0.0.1", Deadline.after(SOON), "own secret")
        store = meet(bootstrap, 1, "127.0.0.1", Deadline.after(SOON), "own secret")
        note = bootstrap.get("invitation", Deadline.after(0))
        assert b"own secret" not in note and Invitation.unpack(note).secret == ""
        with pytest.raises(AuthenticationError):
            meet(bootstrap, 1, "127.0.0.1", Deadline.after(SOON), "another")
        with pytest.raises(ConfigError, match="XVCOMM_SECRET is set on rank 0 but not on this rank"):
            meet(bootstrap, 1, "127.0.0.1", Deadline.after(SOON))
        store.close()
        serving.result(SOON).close()


def test_a_secret_that_is_set_is_not_given_up_for_a_public_one() -> None:
    bootstrap = MemoryStore()
    bootstrap.set("invitation", Invitation("127.0.0.1", 1, "public").pack())
    with pytest.raises(ConfigError, match="XVCOMM_SECRET is set on this rank but not on rank 0"):
        meet(bootstrap, 1, "127.0.0.1", Deadline.after(SOON), "own secret")
