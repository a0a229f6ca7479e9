"""The GPU kernels as plain C++ on host memory against the host backend: the same bytes and bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from xvcomm.backends.gpu import kernels as _kernels
from xvcomm.backends.gpu.kernels import ROWS, Kernels, Transfer
from xvcomm.backends.gpu.vendor import Addresses, Runtime, VendorError
from xvcomm.backends.host.device import HostDevice
from xvcomm.config import Config
from xvcomm.jit.cache import KernelCache
from xvcomm.memory.ring import LEAST_APART_CHUNK, LEDGER, Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.testing.cases import distinct, reductions
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, DTYPES, UINT8, DType, ReduceOp
from xvcomm.types.opcode import OpCode

HIP = Path(__file__).resolve().parents[1] / "shims" / "hip"
ELEMENTWISE = [op for op in ReduceOp if op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)]
CASES = [(dtype, op) for dtype in DTYPES for op in reductions(dtype) if op in ELEMENTWISE]
SCALED = [dtype for dtype in DTYPES if dtype.kind != "b"]
MOVED = [("float32", 1), ("bfloat16", 1), ("float8_e4m3fn", 2), ("int16", 4), ("bool", 1), ("complex128", 1)]
"""(dtype, op) of the movers that are tried; the arithmetic of all others is `reduce`'s."""


class PlainRuntime:
    """The part of a Runtime that Kernels uses, for plain C++: a launch runs one thread per block and waits for them."""

    kind = "plain"
    late = 0.0  # seconds that the first block of a launch begins after the others
    source = f'#include "{HIP / "prelude.h"}"\n'

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: list[ctypes.CDLL] = []
        self._image: bytes | None = None

    def architecture(self, index: int) -> str:
        return "native"

    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        # All kernels of these tests at once, which takes seconds, as each alone would.
        if self._image is None:
            self._image = self._compile(source)
        return self._image, {name: f"kernel_{_kernels.NAMES.index(name)}" for name in names}

    def _compile(self, source: str) -> bytes:
        entries = "".join(f"HIPHOST_KERNEL(kernel_{number}, {name})\n" for number, name in enumerate(_kernels.NAMES))
        text, image = self._folder / "source.cpp", self._folder / "image.so"
        text.write_text(f'{source}\n#include "{HIP / "entry.h"}"\n{entries}')
        # What is not aligned would work here, and stop a GPU.
        checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        library = ["-shared", "-fPIC", "-fno-gnu-unique", "-pthread"]
        command = ["g++", "-std=c++17", "-O1", *checks, *library, text, "-o", image]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise VendorError("g++", done.returncode, "compilation", done.stderr)
        return image.read_bytes()

    def addresses(self) -> Addresses:
        return Addresses(0, 0, 0, 0, 0)

    def load(self, image: bytes) -> int:
        file = self._folder / f"loaded{len(self._libraries)}.so"
        file.write_bytes(image)
        self._libraries.append(ctypes.CDLL(str(file)))
        return len(self._libraries) - 1

    def function(self, module: int, name: str) -> int:
        return ctypes.addressof((ctypes.c_size_t * 3).in_dll(self._libraries[module], name))

    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        entry = (ctypes.c_size_t * 3).from_address(function)  # as in entry.h
        packed = ctypes.create_string_buffer(entry[0] + 16)
        place = ctypes.addressof(packed) + -ctypes.addressof(packed) % 16
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(entry[1])(place, params)
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(entry[2])
        grid = (ctypes.c_uint * 3)(blocks, 1, 1)
        indices = [(ctypes.c_uint * 3)(number, 0, 0) for number in range(blocks)]
        first, *others = [threading.Thread(target=run, args=(place, index, grid)) for index in indices]
        for thread in others:
            thread.start()
        time.sleep(self.late)
        first.start()
        for thread in (first, *others):
            thread.join()


@dataclass(frozen=True)
class Bench:
    """Kernels on host memory, and the host backend."""

    kernels: Kernels
    host: HostDevice
    threads: ThreadPoolExecutor
    folder: str

    def both(self, *sides: Callable[[], Any]) -> list[Any]:
        """Run both sides concurrently, each in a thread."""
        return [future.result(60) for future in [self.threads.submit(side) for side in sides]]


class Ring:
    """A ring with each end driven by kernels or by the host backend."""

    def __init__(self, bench: Bench, layout: RingLayout) -> None:
        self.bench = bench
        segment = Segment.create(bench.folder, "kernels", layout.size)
        self.producer = RingEnd.create(segment, layout, peer=1, producer=True)
        self.consumer = RingEnd.open(Segment.attach(bench.folder, segment.name), peer=0, producer=False)
        segment.unlink()
        self.states = [np.zeros(_kernels.STATE_BYTES // 8 + 16, np.uint64) for _ in "pc"]

    def transfer(self, producer: bool, data: np.ndarray, message: Message, **how: Any) -> Transfer:
        """A transfer through one end."""
        end, state = (self.producer, self.states[0]) if producer else (self.consumer, self.states[1])
        aligned = -(-state.ctypes.data // 128) * 128
        at = data.ctypes.data
        return Transfer(end.address, end.slots, aligned, end.geometry, producer, at, message, end.peer, **how)

    def move(self, *args: Any, **how: Any) -> None:
        """One transfer by a kernel."""
        self.bench.kernels.move([self.transfer(*args, **how)], 0)

    def host(self, producer: bool, data: np.ndarray, message: Message, op: ReduceOp | None = None) -> None:
        """One transfer by the host backend."""
        stream = self.bench.host.streams(1)[0]
        stream.deadline = Deadline.after(20)
        if producer:
            self.bench.host.put(self.producer, data.ctypes.data, message, stream)
        else:
            self.bench.host.get(self.consumer, data.ctypes.data, message, stream, op)
        stream.synchronize()

    def close(self) -> None:
        """Unmap both ends."""
        self.producer.close()
        self.consumer.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Shared by the tests: the kernels are compiled once."""
    if not shutil.which("g++"):
        pytest.skip("g++ compiles the kernels for host memory: apt-get install g++")
    folder = tmp_path_factory.mktemp("plain")
    with ThreadPoolExecutor(4) as threads:
        kernels = Kernels(cast(Runtime, PlainRuntime(folder)), 0, KernelCache(folder / "cache"))
        yield Bench(kernels, HostDevice(Config()), threads, Config().shm_dir)


@pytest.fixture(params=[(1, 2), (3, 2), (8, 5)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def link(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Ring]:
    """Rings of one, some and many lanes."""
    ring = Ring(bench, RingLayout(*request.param, 4096))
    yield ring
    ring.close()


def message(nbytes: int, dtype: DType = UINT8, tag: int = 0) -> Message:
    return Message(OpCode.SEND, dtype.code, nbytes, tag)


def anything(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Every bit pattern of small types; zeros, infinities and NaN of large ones."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.itemsize < 4 or dtype.kind in "iu":
        raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        if dtype.name == "float16":
            bits = raw.view(np.uint16)
            bits[(bits & 0x7C00) == 0x7C00] &= 0xFE00  # infinite or a quiet NaN: processors treat others as they like
        return raw.view(dtype.numpy)
    values = rng.standard_normal(count * (2 if dtype.kind == "c" else 1)) * 10.0 ** rng.integers(-30, 30)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-310, 3e38])
    places = rng.random(values.size) < (0.2 if dtype.kind == "f" else 0)
    values[places] = rng.choice(special, places.sum())
    with np.errstate(over="ignore"):
        return values.astype(f"f{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}").view(dtype.numpy)


def placed(x: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """A copy that begins `offset` bytes behind a multiple of 16, and all bytes around it, which are 0xA5."""
    room = np.full(x.nbytes + 64, 0xA5, np.uint8)
    begin = -room.ctypes.data % 16 + 16 + offset
    room[begin : begin + x.nbytes] = x.view(np.uint8)
    return np.ndarray(x.shape, x.dtype, room, begin), room


def assert_bits(got: np.ndarray, want: np.ndarray, *terms: np.ndarray) -> None:
    """Same bits; if several of `terms` are not finite, any NaN matches a NaN, because the host's choice is unspecified."""
    word = f"u{got.itemsize if got.dtype.kind != 'c' else got.itemsize // 2}"
    odd = sum(~np.isfinite(x.astype(np.float32)) for x in terms if x.dtype.kind != "c") if terms else 0
    with np.errstate(invalid="ignore"):
        settled = (np.broadcast_to(odd, want.shape) < 2) | (want == want)
    np.testing.assert_array_equal(got[settled].view(word), want[settled].view(word))
    assert (got[~settled] != got[~settled]).all()


@pytest.mark.parametrize("offset", [0, 1, 4, 7, 8, 14])
def test_every_byte_arrives(link: Ring, offset: int) -> None:
    """Sizes around slots and words, arrays at any address, and nothing beside them is touched."""
    for seed, size in enumerate((0, 1, 15, 16, 17, 4096, 12_289, 100_003, 300_001)):
        data = placed(distinct(UINT8, size, seed), offset)[0]
        target, room = placed(np.full(size, 0xA5, np.uint8), -offset % 16)
        outside = np.setdiff1d(np.arange(room.size), np.arange(size) + target.ctypes.data - room.ctypes.data)
        link.bench.both(
            lambda: link.move(True, data, message(size, tag=seed)),
            lambda: link.move(False, target, message(size, tag=seed)),
        )
        assert_bits(target, data)
        assert set(room[outside]) == {0xA5}
        assert (link.producer.finished(), link.consumer.finished()) == ((seed + 1, True), (seed + 1, True))


@pytest.mark.parametrize(
    ("name", "op"), [("uint8", None), ("uint8", 1), ("int16", 1), ("float32", 1), ("complex64", 2), ("complex128", 2)]
)
def test_arrays_begin_and_end_anywhere(bench: Bench, name: str, op: int | None) -> None:
    """Every size up to 200 bytes at every offset from 16, at both ends; nothing beside the arrays is touched."""
    dtype = BY_NAME[name]
    combine = {None: lambda mine, theirs: theirs, 1: np.add, 2: np.multiply}[op]
    rings = [Ring(bench, RingLayout(1, 2, 4096)) for _ in range(ROWS // 2)]
    for count in range(200 // dtype.itemsize + 1):
        values = [np.random.default_rng(seed).integers(0, 50, count).astype(dtype.numpy) for seed in range(ROWS)]
        sent = [placed(x, (offset + count) % 16)[0] for offset, x in enumerate(values[: len(rings)])]
        rooms = [placed(x, (5 * offset + count) % 16) for offset, x in enumerate(values[len(rings) :])]
        rows = [ring.transfer(True, x, message(x.nbytes, dtype)) for ring, x in zip(rings, sent, strict=True)]
        how = {} if op is None else {"op": ReduceOp(op)}
        rows += [
            ring.transfer(False, x, message(x.nbytes, dtype), **how) for ring, (x, _) in zip(rings, rooms, strict=True)
        ]
        bench.kernels.move(rows, 0)
        for offset, (_, room) in enumerate(rooms):
            want = combine(values[len(rings) + offset], values[offset])
            np.testing.assert_array_equal(room, placed(want, (5 * offset + count) % 16)[1], f"{count} at {offset}")
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("sender", ["host", "move"])
def test_kernels_interoperate_with_the_host_backend(link: Ring, sender: str) -> None:
    """Either end may be the host backend's; messages follow each other."""
    sizes = (0, 5, 4096, 70_001, 250_000)
    data = [distinct(UINT8, size, seed) for seed, size in enumerate(sizes)]
    targets = [np.zeros_like(x) for x in data]

    def run(kind: str, producer: bool, arrays: list[np.ndarray]) -> None:
        for tag, x in enumerate(arrays):
            getattr(link, kind)(producer, x, message(x.nbytes, tag=tag))

    receiver = "move" if sender == "host" else "host"
    link.bench.both(lambda: run(sender, True, data), lambda: run(receiver, False, targets))
    for got, want in zip(targets, data, strict=True):
        assert_bits(got, want)


def test_one_launch_moves_many(bench: Bench) -> None:
    """More transfers and lanes than a launch has blocks; both directions at once, and the ledger goes round."""
    rings = [Ring(bench, RingLayout(8, 2, 4096)) for _ in range(12)]
    data = [distinct(UINT8, 100_001, seed) for seed in range(12)]
    for _ in range(3):
        targets = [np.zeros_like(x) for x in data]
        there = [ring.transfer(True, x, message(x.nbytes)) for ring, x in zip(rings, data, strict=True)]
        back = [ring.transfer(False, x, message(x.nbytes)) for ring, x in zip(rings, targets, strict=True)]
        bench.kernels.move([*there, *back], 0)
        for got, want in zip(targets, data, strict=True):
            assert_bits(got, want)
    for ring in rings:
        ring.close()


def test_the_producer_waits_for_the_ledger(bench: Bench) -> None:
    """Messages of no bytes fill no slots, but the ledger: the producer waits for the consumer's progress."""
    ring, count, data = Ring(bench, RingLayout(1, 2, 4096)), 3 * LEDGER, np.zeros(1, np.uint8)

    def run(producer: bool) -> None:
        for tag in range(count):
            ring.move(producer, data, message(0, tag=tag))

    ahead = bench.threads.submit(run, True)
    until = time.monotonic() + 20
    while ring.producer.finished()[0] < LEDGER and time.monotonic() < until:
        time.sleep(0.001)
    with pytest.raises(TimeoutError):
        ahead.result(0.1)
    assert ring.producer.finished() == (LEDGER, True)
    bench.both(lambda: run(False), ahead.result)
    assert ring.consumer.finished() == (count, True)
    ring.close()


@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 1_000_003])
def test_slots_may_lie_elsewhere(bench: Bench, nbytes: int) -> None:
    """Counters and descriptions are in the ring's memory, which then ends with them; the bytes go through the slots alone."""
    layout = RingLayout(3, 2, 128 << 10, apart=True)
    ring, data, target = Ring(bench, layout), distinct(UINT8, nbytes, 1), np.zeros(nbytes, np.uint8)
    slots = np.zeros(layout.capacity, np.uint8)
    assert ring.consumer.layout == layout and layout.size == layout.data
    ring.producer.slots = ring.consumer.slots = slots.ctypes.data
    bench.both(lambda: ring.move(True, data, message(nbytes)), lambda: ring.move(False, target, message(nbytes)))
    assert_bits(target, data)
    if nbytes <= LEAST_APART_CHUNK:  # one slot takes it
        assert_bits(slots[:nbytes], data)
        assert not slots[layout.slot_bytes :].any()
    assert ring.producer.finished() == ring.consumer.finished() == (1, True)
    ring.close()


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_differing_descriptions_deliver_nothing(bench: Bench, first: str) -> None:
    """Both ends stop, say why, and stay stopped."""
    ring, target = Ring(bench, RingLayout(3, 2, 4096)), np.full(70_000, 7, np.uint8)

    def put() -> None:
        ring.move(True, distinct(UINT8, 60_000, 1), message(60_000, tag=1))

    def get() -> None:
        ring.move(False, target, message(70_000, tag=1))

    order = [put, get] if first == "producer" else [get, put]
    early = bench.threads.submit(order[0])
    with pytest.raises(TimeoutError):
        early.result(0.2)
    order[1]()
    early.result(20)
    assert set(target) == {7}
    word = ring.producer.abort_word()
    assert Reason.parse(word)[0] is Reason.MISMATCH and Reason.parse(word)[1] in (0, 1)
    assert ring.producer.mismatch() is not None
    assert ring.consumer.finished() == (0, False)
    ring.move(False, target, message(5))
    assert ring.consumer.finished() == (0, False)
    ring.close()


def test_kernels_leave_a_stopped_ring(bench: Bench) -> None:
    """Waiting kernels leave; what was published before a peer left is still delivered, what was not is given up."""
    ring, data, target = Ring(bench, RingLayout(2, 4, 4096)), distinct(UINT8, 4000, 1), np.zeros(4000, np.uint8)
    ring.move(True, data, message(4000))
    ring.producer.abort(Reason.LEFT.word(0))
    ring.move(False, target, message(4000))
    assert_bits(target, data)
    assert ring.consumer.finished() == (1, True)
    ring.move(False, target, message(4000))
    ring.move(True, data, message(4000))
    assert ring.producer.finished() == ring.consumer.finished() == (1, False)
    ring.close()


@pytest.mark.parametrize("published", [True, False])
def test_late_first_block_of_a_stopped_ring(bench: Bench, published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone compares the descriptions: the others wait for it, and leave with it."""
    ring, data, target = Ring(bench, RingLayout(3, 4, 4096)), distinct(UINT8, 40_000, 1), np.zeros(40_000, np.uint8)
    if published:
        ring.move(True, data, message(data.nbytes))
    ring.producer.abort(Reason.LEFT.word(0))
    monkeypatch.setattr(bench.kernels._runtime, "late", 0.2)
    bench.threads.submit(ring.move, False, target, message(data.nbytes)).result(20)
    assert_bits(target, data if published else np.zeros_like(data))
    assert ring.consumer.finished() == (1, True) if published else (0, False)
    ring.close()


def test_a_producer_stops_in_the_middle(bench: Bench) -> None:
    """A message larger than the ring, which nobody takes: the kernel leaves once the ring stops."""
    ring, data = Ring(bench, RingLayout(2, 2, 4096)), distinct(UINT8, 200_000, 1)
    running = bench.threads.submit(ring.move, True, data, message(data.nbytes))
    with pytest.raises(TimeoutError):
        running.result(0.2)
    ring.consumer.abort(Reason.PEER_LOST.word(1))
    running.result(20)
    assert ring.producer.finished() == (0, False)
    ring.close()


@pytest.mark.parametrize("remote_first", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize(("name", "op"), MOVED)
def test_get_reduce_equals_the_hosts(bench: Bench, name: str, op: int, offset: int, remote_first: bool) -> None:
    """The same bits, NaN included, whatever the cut; the array may begin at any byte, which need not suit its items."""
    dtype = BY_NAME[name]
    mine, theirs = anything(dtype, 10_001, 1), anything(dtype, 10_001, 2)
    want, got, described = mine.copy(), placed(mine, offset)[0], message(theirs.nbytes, dtype)
    ring = Ring(bench, RingLayout(3, 2, 4096))
    for end in ("host", "move"):
        bench.both(
            lambda: ring.move(True, theirs, described),
            lambda: reduce_from(ring, end, want if end == "host" else got, described, ReduceOp(op), remote_first),
        )
        ring.close()
        ring = Ring(bench, RingLayout(3, 2, 4096))
    ring.close()
    assert_bits(got, want, mine, theirs)


def reduce_from(ring: Ring, end: str, data: np.ndarray, said: Message, op: ReduceOp, remote_first: bool) -> None:
    if end == "move":
        ring.move(False, data, said, op=op, remote_first=remote_first)
        return
    stream = ring.bench.host.streams(1)[0]
    stream.deadline = Deadline.after(20)
    ring.bench.host.get(ring.consumer, data.ctypes.data, said, stream, op, remote_first=remote_first)
    stream.synchronize()


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_reduce_gives_the_hosts_bits(bench: Bench, dtype: DType, op: ReduceOp) -> None:
    """One, two and more operands, aligned, alike off it and each on its own, onto memory of its own and onto one of them."""
    for ways, offset, apart in ((1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 3, 1), (5, 0, 0)):
        terms = [anything(dtype, 7001 if offset else 70_001, seed) for seed in range(ways)]
        want, stream, sources = np.empty_like(terms[0]), bench.host.streams(1)[0], [x.ctypes.data for x in terms]
        divisor = 3 if op is ReduceOp.SUM and dtype.kind == "f" and ways > 1 and not offset else 0
        bench.host.reduce(want.ctypes.data, sources, want.size, dtype, op, stream, divisor=divisor)
        for place in (None, ways - 1):
            inputs = [placed(x, (offset + way * apart) * dtype.itemsize % 16)[0] for way, x in enumerate(terms)]
            target, room = placed(np.empty_like(want), offset * dtype.itemsize % 16)
            got = target if place is None else inputs[place]
            bench.kernels.reduce(got.ctypes.data, [x.ctypes.data for x in inputs], got.size, dtype, op, 0, divisor)
            assert_bits(got, want, *terms)
            assert set(room[: target.ctypes.data - room.ctypes.data]) == set(room[-8:]) == {0xA5}


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_scale_gives_the_hosts_bits(bench: Bench, dtype: DType) -> None:
    """Multiplied and divided, aligned, off it alike, and each on its own."""
    for source, target in ((0, 0), (1, 1), (3, 3), (0, 1)):
        x = placed(anything(dtype, 9001, 3), source * dtype.itemsize % 16)[0]
        if dtype.kind == "i":
            np.maximum(x, -np.iinfo(x.dtype).max, out=x)  # the least number has no opposite
        for factor, divisor in ((3.0, 0), (0.0, 3), (0.0, 7)):
            want, got = np.empty_like(x), placed(np.empty_like(x), target * dtype.itemsize % 16)[0]
            bench.host.scale(want.ctypes.data, x.ctypes.data, x.size, dtype, factor, divisor, bench.host.streams(1)[0])
            bench.kernels.scale(got.ctypes.data, x.ctypes.data, x.size, dtype, factor, divisor, 0)
            assert_bits(got, want)
