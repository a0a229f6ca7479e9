"""The TCP store rejects peers without its secret, and its server survives misbehaving clients."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from xvcomm.abc.store import Set
from xvcomm.errors import AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.rendezvous.store import TcpServer, TcpStore, open_store, protocol
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.testing.signals import await_that
from xvcomm.types.deadline import NEVER, Deadline

pytestmark = pytest.mark.usefixtures("no_store_thread_left")
SOON = 60.0


def client(server: TcpServer, secret: str = "secret", **more: int) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, secret, Deadline.after(SOON), **more)


def test_wrong_secret_is_refused_and_the_server_survives(server: TcpServer, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AuthenticationError, match="XVCOMM_SECRET") as caught:
        client(server, "wrong")
    assert "secret'" not in str(caught.value) and "wrong" not in str(caught.value)
    store = client(server)
    store.set("k", b"1")
    store.close()
    assert capfd.readouterr() == ("", "")


def test_a_server_without_the_secret_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(protocol.frame(protocol.Challenge(b"n" * protocol.NONCE)))
            peer.recv(4096)
            peer.sendall(protocol.frame(protocol.Welcome(b"p" * 32)))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(AuthenticationError):
        TcpStore("127.0.0.1", listener.getsockname()[1], "secret", Deadline.after(SOON))
    thread.join()
    listener.close()


def test_a_proof_cannot_be_sent_back() -> None:
    proof = protocol.prove("secret", "server", b"a", b"b", 0)
    assert protocol.proven("secret", "server", b"a", b"b", 0, proof)
    assert not protocol.proven("secret", "client", b"a", b"b", 0, proof)
    assert not protocol.proven("secret", "server", b"b", b"a", 0, proof)
    assert not protocol.proven("secret", "server", b"a", b"b", 1, proof)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0\0\0\x05hello",
        b"\xff" * 100,
        b"\0\0\0\x04" + b"\x93\xa3Set",
        b"\0\0\0\x08" + b"\x94\xa6\xff\xfe\xfd\xfc\xfb\xfa",
        b"\0\0\x03\xff" + b"\x91" * 1023,
        b"\0\0\0\x0e" + b"\x94\xa6Answer\x91\xa2\xff\xfe\xa0\x00",
        protocol.frame(protocol.Exchange([Set("k", b"not allowed yet")], [], None)),
        protocol.frame(protocol.Answer(b"short", b"", 0)),
        b"\0\0",
    ],
)
def test_malformed_data_is_ignored(server: TcpServer, rubbish: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as rude:
        rude.sendall(rubbish)
        if len(rubbish) > protocol.HEADER:
            while rude.recv(4096):
                pass
    store = client(server)
    assert store.add("n", 1) == 1
    store.close()
    assert capfd.readouterr() == ("", "")


def test_silent_connections_do_not_block_clients(server: TcpServer) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    member, before = client(server), descriptors()
    silent: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        for _ in range(1000):
            silent.append(socket.create_connection(("127.0.0.1", server.port), timeout=SOON))
        late = TcpStore("127.0.0.1", server.port, "secret", Deadline.after(60))
        late.set("k", b"1")
        assert descriptors() - before - len(silent) < 300
        assert member.get("k", Deadline.after(SOON)) == b"1"
        late.close()
    finally:
        for sock in silent:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    member.close()


def test_a_client_that_violates_the_protocol_is_disconnected(server: TcpServer) -> None:
    store = client(server)
    store.set("k", b"1")
    link = store._take(Deadline.after(SOON), "test")
    link._sock.sendall((protocol.FRAME_LIMIT + 1).to_bytes(4, "big"))
    with pytest.raises(ConnectionResetError):
        link.receive(protocol.FRAME_LIMIT, Deadline.after(SOON))
    store._discard(link)
    assert store.get("k", Deadline.after(SOON)) == b"1"
    store.close()


def test_too_large_a_value_is_refused_before_it_is_sent(server: TcpServer) -> None:
    store = client(server)
    with pytest.raises(StoreError, match="too many"):
        store.set("k", b"x" * protocol.FRAME_LIMIT)
    store.set("k", b"x" * (8 << 20))
    assert len(store.get("k", Deadline.after(SOON))) == 8 << 20
    store.close()


def test_adding_to_a_text_is_an_error(server: TcpServer) -> None:
    store = client(server)
    store.set("k", b"text")
    with pytest.raises(StoreError, match="not an integer"):
        store.add("k", 1)
    store.add("n", 2**62)
    with pytest.raises(StoreError, match="64 bits"):
        store.add("n", 2**62)
    store.close()


def test_port_taken(server: TcpServer) -> None:
    with pytest.raises(StoreError, match=f"port {server.port} .*in use.*another port"):
        TcpServer("127.0.0.1", server.port, "secret")


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.1.2.3.4", 0)])
def test_addresses_that_cannot_be_served(host: str, port: int) -> None:
    with pytest.raises(StoreError, match=f"cannot serve.*{port}"):
        TcpServer(host, port, "secret")


def test_no_server_names_the_address(port: int) -> None:
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}.*XVCOMM_STORE"):
        TcpStore("127.0.0.1", port, "secret", Deadline.after(0.1))


def test_something_else_listens() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def ssh() -> None:
        with listener.accept()[0] as peer:
            peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

    thread = threading.Thread(target=ssh)
    thread.start()
    with pytest.raises(StoreError, match=f"127.0.0.1:{port} is not an xvcomm store"):
        TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))
    thread.join()
    listener.close()


def test_a_silent_listener_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
            TcpStore("127.0.0.1", port, "secret", Deadline.after(0.2))


SERVING = """
import sys, time
from xvcomm.rendezvous.store import TcpServer
print(TcpServer("127.0.0.1", 0, "secret").port, flush=True)
time.sleep(600)
"""


def test_a_stopped_server_holds_no_call_beyond_its_deadline() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout is not None
            store = TcpStore("127.0.0.1", int(serving.stdout.readline()), "secret", Deadline.after(60))
            store.set("k", b"1")
            guarded = GuardedStore("part", store, lambda: None)
            serving.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, serving.pid, os.WSTOPPED)  # the signal takes its time
            for call in (
                lambda: store.set("k", b"2", Deadline.after(0.1)),
                lambda: store.add("n", 1, Deadline.after(0.1)),
                lambda: store.get("k", Deadline.after(0.1)),
                lambda: guarded.get("k", Deadline.after(0.1)),
                lambda: guarded.wait(["k"], Deadline.after(0.1)),
            ):
                began = time.monotonic()
                with pytest.raises(DeadlineExceeded, match="stopped"):
                    call()
                assert time.monotonic() - began < 8
            serving.send_signal(signal.SIGCONT)
            assert store.get("k", Deadline.after(60)) in (b"1", b"2")
            store.close()
        finally:
            serving.kill()


FORKING = """
import os, sys, time
from xvcomm.rendezvous.store import TcpServer
server = TcpServer("127.0.0.1", int(sys.argv[1]), "secret")
print(server.port, flush=True)
sys.stdin.readline()  # clients are connected by now
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def free(port: int) -> bool:
    try:
        TcpServer("127.0.0.1", port, "secret").close()
    except StoreError:
        return False
    return True


def test_a_forked_child_keeps_nothing_of_the_server() -> None:
    """Clients notice the server's death at once, and its port is free, while the child lives."""
    command = [sys.executable, "-c", FORKING, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None and serving.stdin is not None
        store = TcpStore("127.0.0.1", port := int(serving.stdout.readline()), "secret", Deadline.after(60))
        store.set("k", b"1")
        print(file=serving.stdin, flush=True)
        child = int(serving.stdout.readline())
        try:
            serving.kill()
            serving.wait(60)
            with pytest.raises(StoreError):
                store.get("never set", Deadline.after(60))
            store.close()
            await_that(lambda: free(port))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_slow_server_does_not_exceed_the_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def drip() -> None:
        with listener.accept()[0] as peer:
            for byte in (400).to_bytes(4, "big") + b"x" * 400:
                if done.wait(0.05):
                    return
                try:
                    peer.sendall(bytes([byte]))
                except OSError:
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises(StoreError):
        TcpStore("127.0.0.1", listener.getsockname()[1], "secret", Deadline.after(0.3))
    assert time.monotonic() - began < 8
    done.set()
    thread.join()
    listener.close()


def test_the_server_may_come_later(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(TcpStore, "127.0.0.1", port, "secret", Deadline.after(SOON))
        time.sleep(0.05)
        server = TcpServer("127.0.0.1", port, "secret")
        coming.result(SOON).close()
    server.close()


def test_a_lost_server_wakes_who_waits(server: TcpServer) -> None:
    store = client(server)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(store.get, "never", NEVER)
        time.sleep(0.05)
        server.close()
        with pytest.raises(StoreError, match="was lost during get 'never'"):
            got.result(SOON)
    with pytest.raises(StoreError):
        store.set("k", b"1")
    store.close()


def test_closing_wakes_who_waits_and_refuses_more(server: TcpServer) -> None:
    store = client(server)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(store.get, "never", NEVER)
        time.sleep(0.05)
        store.close()
        with pytest.raises(StoreError):
            got.result(SOON)
    store.close()
    with pytest.raises(StoreError, match="closed by this process"):
        store.add("n", 1)


def test_a_closing_server_stays_for_those_who_use_it(server: TcpServer) -> None:
    store = client(server)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close, SOON)
        time.sleep(0.05)
        store.set("k", b"1")
        assert not closing.done()
        store.close()
        closing.result(SOON)


def test_grace_ends(server: TcpServer) -> None:
    store = client(server)
    server.close(0.05)
    with pytest.raises(StoreError):
        store.set("k", b"1")
    store.close()


def test_epochs_separate_communicators() -> None:
    server = TcpServer("127.0.0.1", 0, "secret", epoch=0)
    client(server, epoch=0).close()
    with pytest.raises(StoreError, match="earlier communicator"):
        TcpStore("127.0.0.1", server.port, "secret", Deadline.after(0.1), epoch=1)
    server.close()


def test_connections_during_close_are_refused(port: int) -> None:
    done, longest = threading.Event(), [0.0]

    def knock() -> None:
        while not done.is_set():
            began = time.monotonic()
            with pytest.raises(StoreError):
                TcpStore("127.0.0.1", port, "secret", Deadline.after(0.02), epoch=1)
            longest.append(time.monotonic() - began)

    with ThreadPoolExecutor(2) as pool:
        knocking = [pool.submit(knock) for _ in range(2)]
        for _ in range(100):
            server = TcpServer("127.0.0.1", port, "secret", epoch=0)
            time.sleep(0.002)
            server.close()
        done.set()
        for knocker in knocking:
            knocker.result(SOON)
    assert max(longest) < protocol.HANDSHAKE_SECONDS / 2


def test_two_jobs_do_not_mix() -> None:
    one, other = TcpServer("127.0.0.1", 0, "one"), TcpServer("127.0.0.1", 0, "other")
    first, second = client(one, "one"), client(other, "other")
    first.set("k", b"1")
    second.set("k", b"2")
    assert first.get("k", Deadline.after(SOON)) == b"1"
    with pytest.raises(AuthenticationError):
        client(other, "one")
    for thing in (first, second, one, other):
        thing.close()


def test_the_port_is_free_again_at_once(port: int) -> None:
    for _ in range(3):
        server = TcpServer("127.0.0.1", port, "secret")
        store = client(server)
        server.close()
        store.close()


def test_any_interface_and_ipv6() -> None:
    server = TcpServer("localhost.localdomain.invalid", 0, "secret")
    client(server).close()
    server.close()
    try:
        server = TcpServer("::1", 0, "secret")
    except StoreError:
        pytest.skip("no IPv6 here")
    assert server.address == f"tcp://[::1]:{server.port}"
    open_store(server.address, "secret", Deadline.after(SOON)).close()
    server.close()


def test_empty_secret() -> None:
    with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
        TcpServer("127.0.0.1", 0, "")


def test_messages_keep_their_shape() -> None:
    """Ranks of two versions must not misread each other: this is version 4."""
    request = protocol.Exchange([Set("k", b"v")], ["l"], None)
    assert msgspec.msgpack.decode(protocol.frame(request)[4:]) == ["Exchange", [["Set", "k", b"v"]], ["l"], None]
    assert msgspec.msgpack.decode(protocol.frame(protocol.Read("p", 1, None))[4:]) == ["Read", "p", 1, None]
    with pytest.raises(protocol.Malformed):
        protocol.decode_request(protocol.frame(protocol.Done())[4:])


def test_a_forked_child_does_not_keep_the_store() -> None:
    """Data loaders fork: a child must not hold connections open that its parent has closed."""
    server = TcpServer("127.0.0.1", 0, "s")
    store = TcpStore("127.0.0.1", server.port, "s", Deadline.after(SOON))
    gate = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    began = time.monotonic()
    store.close()
    server.close(SOON)
    assert time.monotonic() - began < 5
    with socket.create_server(("127.0.0.1", server.port)):
        pass
    os.close(gate[0])
    os.close(gate[1])
    assert os.waitpid(pid, 0)[1] == 0
