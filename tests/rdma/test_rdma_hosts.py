"""Between two hosts with Soft-RoCE: devices and GIDs, and bytes that compiled code moves over both NICs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rdma

CHAINS, PIECES, AREA, DEPTH = 1000, 4, 8192, 64
SECONDS = 120.0


def devices() -> list[Any]:
    from xvcomm.backends.rdma.devices import devices as found

    return sorted(found(), key=lambda device: device.name)


def gid_of(device: Any, address: str) -> Any:
    """The GID of RoCE v2 of an address, on port 1."""
    return next(g for g in device.ports[0].gids if (g.version, g.address) == ("RoCE v2", address))


def test_devices_have_the_addresses_of_their_interfaces(other_host: Any) -> None:
    found = devices()
    assert [device.name for device in found] == [f"rxe{nic}" for nic in range(other_host.nics)]
    for nic, device in enumerate(found):
        (port,) = device.ports
        assert (port.number, port.state, port.link, port.mtu) == (1, "active", "Ethernet", 4096)
        gids = {ip_address(gid.address): gid for gid in port.gids}
        for name in ("HOST_ADDR", "HOST_ADDR6"):
            gid = gids[ip_address(os.environ[f"{name}_{other_host.index}_{nic}"])]
            assert (gid.version, gid.interface) == ("RoCE v2", f"eth{nic}")


class End:
    """This host's queue pair on one NIC, connected to the other host's, and memory that both write."""

    def __init__(
        self,
        other_host: Any,
        nic: int,
        memory: np.ndarray[Any, Any],
        words: np.ndarray[Any, Any],
        entries: int = 256,
        receives: int = 1,
        timeout: int = 12,
    ) -> None:
        from xvcomm.backends.rdma.pairs import Domain, Path, PolledQueue, ReliableQueue, Remote

        device = devices()[nic]
        mine = gid_of(device, other_host.address(other_host.index, nic))
        self.domain = Domain(device.name)
        self.region = self.domain.register(memory.ctypes.data, memory.nbytes)
        self.words = self.domain.register(words.ctypes.data, words.nbytes)
        self.completions = PolledQueue(self.domain, entries)
        self.queue = ReliableQueue(self.domain, self.completions, DEPTH, inline=64, receives=receives)
        self.theirs = other_host.swap({
            "number": self.queue.number, "gid": mine.value.hex(), "memory": memory.ctypes.data, "key": self.region.rkey,
            "words": words.ctypes.data, "words_key": self.words.rkey,
        })  # fmt: skip
        remote = Remote(self.theirs["number"], bytes.fromhex(self.theirs["gid"]))
        self.queue.connect(Path(1, mine.index, device.ports[0].mtu, timeout=timeout, retries=3), remote)

    def close(self) -> None:
        self.queue.close()
        self.completions.close()
        self.domain.close()


@pytest.fixture
def connect(other_host: Any) -> Iterator[Callable[..., End]]:
    """`End`, closed when the test has ended."""
    with ExitStack() as ends:

        def made(nic: int, memory: np.ndarray[Any, Any], words: np.ndarray[Any, Any], **options: Any) -> End:
            end = End(other_host, nic, memory, words, **options)
            ends.callback(end.close)
            return end

        yield made


def take_by_event(end: End, seconds: float) -> int:
    """Completions, after sleeping on the channel until there are some."""
    import driver

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if taken := driver.take(end.completions.address):
            return int(taken)
        assert driver.arm(end.completions.address) == 0
        if taken := driver.take(end.completions.address):
            return int(taken)
        if select.select([end.completions.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            assert driver.take_events(end.completions.address) >= 1
    return 0


def plan() -> list[tuple[int, list[tuple[int, int]]]]:
    """For each chain its NIC and its pieces, offset and bytes in the chain's area: the same on both hosts."""
    random = np.random.default_rng(26)
    chains = []
    for _ in range(CHAINS):
        cuts = (
            np.sort(random.choice(np.arange(1, AREA // 8), 2 * int(random.integers(1, PIECES + 1)), replace=False)) * 8
        )
        pieces = [(int(begin), int(end - begin)) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
        chains.append((int(random.integers(2)), pieces))
    return chains


def payload() -> np.ndarray[Any, Any]:
    return np.random.default_rng(27).integers(1, 1 << 62, CHAINS * AREA // 8, np.int64)


def send_all(ends: list[End], source: np.ndarray[Any, Any], counters: np.ndarray[Any, Any]) -> None:
    """Post all chains, each on its NIC, and wait until all have been written."""
    import driver

    jobs = np.zeros(PIECES, driver.JOB)
    for chain, (nic, pieces) in enumerate(plan()):
        end = ends[nic]
        for i, (at, nbytes) in enumerate(pieces):
            where = chain * AREA + at
            jobs[i] = (
                source.ctypes.data + where,
                end.region.lkey,
                end.theirs["memory"] + where,
                end.theirs["key"],
                nbytes,
            )
        arguments = (jobs.ctypes.data, len(pieces), counters[nic:].ctypes.data, end.theirs["words"] + 8 * nic)
        while not (posted := driver.send_chain(end.queue.address, *arguments, end.theirs["words_key"])):
            assert take_by_event(end, SECONDS)
        assert posted == 1
        driver.take(end.completions.address)
    for end in ends:
        while not end.queue.drained:
            assert take_by_event(end, SECONDS)
        assert end.queue.failure() is None
        assert end.queue.record.written == end.queue.record.posted


def watch(arrived: np.ndarray[Any, Any], counters: np.ndarray[Any, Any]) -> int:
    """Follow both counters until all chains have come; all of a chain must be there when its counter is. Changes seen."""
    expected, seen, changes = payload(), [0, 0], 0
    of_nic: list[list[tuple[int, list[tuple[int, int]]]]] = [[], []]
    for chain, (nic, pieces) in enumerate(plan()):
        of_nic[nic].append((chain, pieces))
    deadline = time.monotonic() + SECONDS
    while seen != [len(chains) for chains in of_nic]:
        assert time.monotonic() < deadline, f"only {seen} have come"
        for nic in (0, 1):
            now = int(counters[nic])
            assert now >= seen[nic]
            changes += now > seen[nic]
            for chain, pieces in of_nic[nic][seen[nic] : now]:
                for at, nbytes in pieces:
                    words = slice((chain * AREA + at) // 8, (chain * AREA + at + nbytes) // 8)
                    assert (arrived[words] == expected[words]).all(), f"chain {chain} is not there, its counter is"
            seen[nic] = now
        time.sleep(0)  # lets the kernel's part of Soft-RoCE run
    return changes


@pytest.mark.parametrize("sender", [0, 1])
def test_random_chains_over_both_nics(other_host: Any, connect: Any, sender: int) -> None:
    sends = other_host.index == sender
    memory = payload() if sends else np.zeros(CHAINS * AREA // 8, np.int64)
    words = np.zeros(2, np.int64)
    ends = [connect(nic, memory, words, timeout=17) for nic in (0, 1)]  # half a second: this machine may be busy
    other_host.swap()
    if sends:
        send_all(ends, memory, np.zeros(2, np.int64))
    else:
        assert watch(memory, words) > 2
        pieces = [(chain * AREA + at, n) for chain, (_, chosen) in enumerate(plan()) for at, n in chosen]
        for begin, nbytes in pieces:
            memory[begin // 8 : (begin + nbytes) // 8] = 0
        assert not memory.any(), "bytes beside the pieces were written"
    other_host.swap()


WRONG_KEY = 0x5500


@pytest.mark.parametrize("nic", [0, 1])
@pytest.mark.parametrize(("fault", "told"), [
    ("remote key", "REM_ACCESS_ERR: the other side has not registered that memory"),
    ("local key", "WR_FLUSH_ERR: the queue pair was in the error state, or the memory is not registered"),
    ("silence", "RETRY_EXC_ERR: the other side does not answer"),
])  # fmt: skip
def test_a_write_that_fails_is_named(other_host: Any, connect: Any, nic: int, fault: str, told: str) -> None:
    import driver

    memory, words = np.zeros(AREA // 8, np.int64), np.zeros(2, np.int64)
    end = connect(nic, memory, words)
    if other_host.index == 1 and fault == "silence":
        end.queue.fail()
    other_host.swap()
    if other_host.index == 0:
        key = end.region.lkey ^ (WRONG_KEY if fault == "local key" else 0)
        there_key = end.theirs["key"] ^ (WRONG_KEY if fault == "remote key" else 0)
        jobs = np.array([(memory.ctypes.data, key, end.theirs["memory"], there_key, AREA)], driver.JOB)
        counter = words.copy()
        arguments = (jobs.ctypes.data, 1, counter.ctypes.data, end.theirs["words"], end.theirs["words_key"])
        assert driver.send_chain(end.queue.address, *arguments) == 1
        while not end.queue.drained:
            assert take_by_event(end, SECONDS)
        assert str(end.queue.failure()).startswith(told)
        assert end.queue.record.written == 0
    other_host.swap()
    assert not words.any(), "the counter came, though the WRITE before it failed"
    other_host.swap()


def test_a_queue_pair_is_drained_before_and_after_it_fails(other_host: Any, connect: Any) -> None:
    import driver

    memory, words = np.zeros(AREA // 8, np.int64), np.zeros(2, np.int64)
    end = connect(0, memory, words)
    other_host.swap()
    assert driver.flush(end.queue.address) == 0
    while not end.queue.drained:
        assert take_by_event(end, SECONDS)
    assert end.queue.failure() is None
    other_host.swap()
    end.queue.fail()
    assert driver.flush(end.queue.address) == 0
    while not end.queue.drained:
        assert take_by_event(end, SECONDS)
    assert str(end.queue.failure()).startswith("WR_FLUSH_ERR")
    other_host.swap()


def test_a_completion_queue_that_overflows_is_reported(other_host: Any, connect: Any) -> None:
    import driver

    from xvcomm.backends.rdma.events import Events

    memory, words = np.zeros(AREA // 8, np.int64), np.zeros(2, np.int64)
    end = connect(0, memory, words, entries=2)
    events = Events(end.domain.name, end.domain.context)
    other_host.swap()
    if other_host.index == 0:
        counter = words.copy()
        for _ in range(DEPTH):
            assert driver.send_chain(
                end.queue.address, 0, 0, counter.ctypes.data, end.theirs["words"], end.theirs["words_key"]
            )
        deadline = time.monotonic() + SECONDS
        found: list[Any] = []
        while not any(event.name == "CQ_ERR" for event in found):
            assert time.monotonic() < deadline, [str(event) for event in found]
            if select.select([events.fd], [], [], 1)[0]:
                found += events.take()
        event = next(event for event in found if event.name == "CQ_ERR")
        assert event.loss
        assert "less room than its queue pairs" in str(event)
    other_host.swap()


FRAMES, BUFFERS, FRAME_BYTES = 500, 16, 1152


@pytest.mark.parametrize("sender", [0, 1])
def test_frames_arrive_behind_what_was_written_before_them(other_host: Any, connect: Any, sender: int) -> None:
    """More frames than receives are posted: the device repeats those that come too early.

    Soft-RoCE gives up after `retries` timeouts without progress, although it is told to wait for ever.
    """
    import driver

    sends = other_host.index == sender
    memory = np.arange(1, FRAMES + 1) if sends else np.zeros(FRAMES, np.int64)
    end = connect(0, memory, np.zeros(2, np.int64), receives=BUFFERS, timeout=19)
    buffers = np.zeros((FRAMES if sends else BUFFERS, FRAME_BYTES // 8), np.int64)
    region = end.domain.register(buffers.ctypes.data, buffers.nbytes)
    end.queue.receive_into(buffers.ctypes.data, region.lkey, FRAME_BYTES, BUFFERS)
    assert driver.offer(end.queue.address, 0) == 0  # compiles it
    other_host.swap()
    if sends:
        buffers[:] = np.arange(FRAMES)[:, None]
        for number, frame in enumerate(buffers):
            here, there = memory[number:].ctypes.data, end.theirs["memory"] + 8 * number
            job = np.array([(here, end.region.lkey, there, end.theirs["key"], 8)], driver.JOB)
            key, nbytes = (region.lkey, FRAME_BYTES) if number % 2 else (0, 64)
            while not driver.send_frame(end.queue.address, job.ctypes.data, 1, frame.ctypes.data, key, nbytes):
                assert take_by_event(end, SECONDS)
        while not end.queue.drained:
            assert take_by_event(end, SECONDS)
        assert end.queue.failure() is None
    else:
        time.sleep(0.1)
        assert driver.offer(end.queue.address, BUFFERS) == 0
        for number in range(FRAMES):
            while end.queue.record.received == number:
                assert take_by_event(end, SECONDS)
            assert memory[number] == number + 1
            assert (buffers[number % BUFFERS][: FRAME_BYTES // 8 if number % 2 else 8] == number).all()
            assert driver.offer(end.queue.address, 1) == 0
        end.queue.fail()
        ended = 0
        while ended < BUFFERS:
            taken = take_by_event(end, SECONDS)
            assert taken
            ended += taken
        assert end.queue.record.received == FRAMES
        assert str(end.queue.failure()).startswith("WR_FLUSH_ERR")
    other_host.swap()


def forked(work: Callable[[], None]) -> None:
    """Do something in a child that is forked without exec, and wait until it has ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("sender", [0, 1])
def test_forks_after_registration_keep_the_bytes_right(other_host: Any, connect: Any, sender: int) -> None:
    """A child that is alive shares the pages while both sides write to them: the device must see the parent's."""
    sends = other_host.index == sender
    memory, words = np.zeros(CHAINS * AREA // 8, np.int64), np.zeros(2, np.int64)
    ends = [connect(nic, memory, words, timeout=17) for nic in (0, 1)]  # half a second: this machine may be busy
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # keeps what the fork gave it until the parent has ended its part
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    memory[:] = payload() if sends else 0  # after the fork: a page that was only shared would be copied now
    assert subprocess.run(["echo", "forked"], capture_output=True, check=True).stdout == b"forked\n"
    forked(lambda: None)
    other_host.swap()
    if sends:
        send_all(ends, memory, np.zeros(2, np.int64))
    else:
        watch(memory, words)
    other_host.swap()
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0


def test_doctor_shows_the_devices_and_a_limit_that_is_too_low(other_host: Any) -> None:
    """The limit counts as doctor says: with CAP_IPC_LOCK it does not, and without it a registration fails."""
    from xvcomm.backends.rdma import report, sysfs
    from xvcomm.backends.tcp import choice
    from xvcomm.config import Config

    told_of = report.examine(Config(), {}, choice.examine(Config(), {}))
    for nic, (device, told) in enumerate(zip(devices(), told_of, strict=True)):
        assert told.used, told
        own = [ip_address(os.environ[f"{name}_{other_host.index}_{nic}"]) for name in ("HOST_ADDR", "HOST_ADDR6")]
        assert sorted(told.ports[0].interfaces) == [f"eth{nic} ({address})" for address in own]
        assert (told.name, told.pcie, told.numa_node, told.ports[0].mtu) == (device.name, "", -1, 4096)
        (of_kernel,) = sysfs.ports(device.name)
        assert (of_kernel.state, of_kernel.link, of_kernel.gids) == ("active", "Ethernet", device.ports[0].gids)
    program = (
        "import numpy\nfrom xvcomm.backends.rdma import pairs, report\nfrom xvcomm.config import Config\n"
        "print(report.examine(Config(), {}, [])[0].obstacles[0].reason)\n"
        "memory = numpy.zeros(4 << 20, numpy.uint8)\npairs.Domain('rxe0').register(memory.ctypes.data, memory.nbytes)\n"
    )
    shell = 'ulimit -l 1024; exec "$0" -c "$1"'
    limited = ["setpriv", "--bounding-set=-ipc_lock", "sh", "-c", shell, sys.executable, program]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("only 1024 KiB of memory may be registered (RLIMIT_MEMLOCK)"), done.stderr
    assert done.returncode != 0
    assert "rxe0 does not register 4194304 bytes" in done.stderr
    other_host.swap()
