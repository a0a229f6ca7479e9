"""A man in the middle cannot alter messages of a TCP store; servers without the secret learn little."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from xvcomm.errors import AuthenticationError, StoreError
from xvcomm.rendezvous.store import TcpServer, TcpStore, protocol
from xvcomm.types.deadline import Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0
Change = Callable[[list[bytes]], list[bytes]]
"""From the frames of one direction so far, the last of them just come, to what is sent on for it."""


def same(frames: list[bytes]) -> list[bytes]:
    return frames[-1:]


def altered(frames: list[bytes]) -> list[bytes]:
    """One bit of the second request's or reply's value; the handshake takes two frames of the server's, one of the client's."""
    return [frames[-1].replace(b"precious", b"Precious")]


def twice(frames: list[bytes]) -> list[bytes]:
    return frames[-1:] * 2 if b"counter" in frames[-1] else frames[-1:]


def former(frames: list[bytes]) -> list[bytes]:
    """The reply before the last in the last one's place."""
    return [frames[-2]] if len(frames) > 3 else frames[-1:]


@contextmanager
def relay(port: int, to_server: Change = same, to_client: Change = same) -> Iterator[int]:
    """A port that forwards one connection to the server with changes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = []

        def carry(source: socket.socket, target: socket.socket, change: Change) -> None:
            seen: list[bytes] = []
            try:
                while head := source.recv(protocol.HEADER, socket.MSG_WAITALL):
                    seen.append(head + source.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
                    for frame in change(seen):
                        target.sendall(frame)
            except OSError:
                pass
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

        def pass_on() -> None:
            with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
                back = threading.Thread(target=carry, args=(far, near, to_client))
                back.start()
                carry(near, far, to_server)
                back.join()

        threads.append(threading.Thread(target=pass_on))
        threads[0].start()
        yield listener.getsockname()[1]
        threads[0].join(SOON)
        assert not threads[0].is_alive()


def through(port: int) -> TcpStore:
    return TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))


@pytest.fixture
def direct(server: TcpServer) -> Iterator[TcpStore]:
    store = through(server.port)
    yield store
    store.close()


def test_a_relay_that_changes_nothing(server: TcpServer) -> None:
    with relay(server.port) as port:
        store = through(port)
        store.set("k", b"precious")
        assert store.get("k", Deadline.after(SOON)) == b"precious"
        store.close()


def test_an_altered_request_is_not_carried_out(server: TcpServer, direct: TcpStore) -> None:
    direct.set("k", b"old")
    with relay(server.port, to_server=altered) as port:
        store = through(port)
        with pytest.raises(StoreError):
            store.set("k", b"precious")
        store.close()
    assert direct.get("k", Deadline.after(SOON)) == b"old"


def test_a_repeated_request_is_carried_out_once(server: TcpServer, direct: TcpStore) -> None:
    with relay(server.port, to_server=twice) as port:
        store = through(port)
        try:
            assert store.add("counter", 1) == 1
        except StoreError:
            pass  # the server may cut the connection before its reply has gone
        store.close()
    assert direct.add("counter", 0) == 1


@pytest.mark.parametrize("change", [altered, former])
def test_altered_and_repeated_replies_are_not_believed(server: TcpServer, direct: TcpStore, change: Change) -> None:
    direct.set("k", b"precious")
    direct.set("other", b"precious too")
    with relay(server.port, to_client=change) as port:
        store = through(port)
        with pytest.raises(AuthenticationError, match="altered, repeated or reordered"):
            assert store.get("k", Deadline.after(SOON)) == b"precious"
            store.get("other", Deadline.after(SOON))
        store.close()


def test_messages_count_in_their_order_and_direction_only() -> None:
    def seal(side: protocol.Side, nonce: bytes = b"n") -> protocol.Seal:
        return protocol.Seal("secret", side, nonce, b"m")

    sender = seal("client")
    first, second = (sender.frame(text)[protocol.HEADER :] for text in (b"1", b"2"))
    receiver = seal("client")
    assert (receiver.open(first), receiver.open(second)) == (b"1", b"2")
    for wrong, payload in ((seal("client"), second), (seal("server"), first), (seal("client", b"o"), first)):
        with pytest.raises(protocol.Forged):
            wrong.open(payload)
    with pytest.raises(protocol.Forged):
        seal("client").open(b"")


@pytest.mark.parametrize(
    "says",
    [
        [b"\0\0\0\x0c" + b"\x92\xa9Challenge\xff"],
        [b"\0\0\0\x04" + b"\x92\xa2\xff\xfe"],
        [protocol.frame(protocol.Challenge(b"n" * protocol.NONCE)), b"\0\0\0\x08" + b"\x92\xa7Refus\xff"],
        [protocol.frame(protocol.Challenge(b"n" * protocol.NONCE)), b"\0\0\0\x0c" + b"\x92\xa7Refused\xa2\xff\xfe"],
        [protocol.frame(protocol.Challenge(b"n" * protocol.NONCE)), (60 << 20).to_bytes(4, "big") + b"x" * 4096],
    ],
)
def test_a_rogue_server_gets_an_error_of_ours_and_little_memory(says: list[bytes]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def rogue() -> None:
        with listener.accept()[0] as peer:
            for text in says:
                peer.sendall(text)
                try:
                    peer.recv(4096)
                except OSError:
                    return

    thread = threading.Thread(target=rogue)
    thread.start()
    tracemalloc.start()
    try:
        with pytest.raises((StoreError, AuthenticationError)):
            through(listener.getsockname()[1])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    thread.join()
    listener.close()
