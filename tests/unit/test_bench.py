"""The benchmark's logic, in this process: requests, checks, timing and reports."""

import csv
import json
import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from xvcomm.cli import app
from xvcomm.cli.bench import memory as bench_memory
from xvcomm.cli.bench.case import CROSSING, OPS, Case, allocate, clear, fill, one_way, ping_pong, wrong
from xvcomm.cli.bench.command import grid, parse_devices, parse_size
from xvcomm.cli.bench.measure import PEERS, Bystanders, Effort, Meeting, Record, measure
from xvcomm.cli.bench.memory import HostMemory, TorchMemory, memory_of
from xvcomm.cli.bench.report import Setting, read_json, write_csv, write_json
from xvcomm.errors import ArgumentError, BackendUnavailable
from xvcomm.rendezvous.store import MemoryStore
from xvcomm.schedule import build
from xvcomm.schedule.steps import Collective, Put, Request
from xvcomm.types.dtype import DTYPES
from xvcomm.types.topology import Topology

DTYPE = {d.name: d for d in DTYPES}


class CpuTorch(TorchMemory):
    """Torch arrays used as on a GPU, on the CPU."""

    def __init__(self, kind="cuda", index=0):
        self._torch = pytest.importorskip("torch")
        self.kind, self.name, self.device = "cuda", "CPU", "cpu"

    def synchronize(self):
        time.sleep(0.001)


MEMORIES = {"numpy": HostMemory, "torch": CpuTorch}


@pytest.fixture(params=MEMORIES)
def memory(request):
    return MEMORIES[request.param]()


def test_arrays_that_lie_elsewhere_are_refused(monkeypatch):
    gpu = SimpleNamespace(capabilities=lambda: SimpleNamespace(kind="cuda", index=0))
    monkeypatch.setattr(bench_memory, "TorchMemory", CpuTorch)
    monkeypatch.setattr(bench_memory, "CupyMemory", CpuTorch)
    with pytest.raises(BackendUnavailable, match=r"no arrays for cuda: .*it is built for host.*install torch or CuPy"):
        memory_of(SimpleNamespace(_context=SimpleNamespace(device=gpu)))


def test_sizes():
    assert [parse_size(t) for t in ("8", "64K", "256m", "1G")] == [8, 65536, 256 << 20, 1 << 30]
    for text in ("", "K", "-1", "1.5M", "8T"):
        with pytest.raises(ArgumentError, match="expected a number of bytes"):
            parse_size(text)
    assert grid(8, 128, 4) == (8, 32, 128) and grid(8, 100, 4) == (8, 32, 100) and grid(8, 8, 4) == (8,)
    assert grid(8, 4, 2) == ()


def test_devices():
    assert parse_devices("", 3) == ()
    assert parse_devices("cuda", 3) == ("cuda",) * 3
    assert parse_devices("cuda:2,rocm:1", 3) == ("cuda", "cuda", "rocm")
    with pytest.raises(ArgumentError, match="2 devices for 3 ranks"):
        parse_devices("cuda:2", 3)
    with pytest.raises(ArgumentError, match="launchers set XVCOMM_DEVICE"):
        parse_devices("cuda", 0)


def test_bench_refuses_invalid_options_before_it_starts_ranks():
    for args, words in (
        (["--op", "all_red"], "unknown operation 'all_red'"),
        (["--dtype", "float31"], "unknown dtype 'float31'"),
        (["--peer", "glue"], "unknown peer 'glue'"),
        (["--min", "8K", "--max", "8"], "no sizes"),
        (["--json", "/nowhere/x.json"], "its folder does not exist"),
        (["-n", "2", "--device", "cuda:3"], "3 devices for 2 ranks"),
    ):
        result = CliRunner().invoke(app, ["bench", *args])
        assert isinstance(result.exception, ArgumentError) and words in str(result.exception)


def test_sizes_are_given_by_the_flags_of_nccl_tests(monkeypatch):
    asked = []
    monkeypatch.setattr("xvcomm.cli.bench.command.start", lambda options: asked.append(options) or 0)
    arguments = ["bench", "-n", "2", "-b", "8", "-e", "128", "-f", "4", "-w", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asked[0].sizes == (8, 32, 128) and asked[0].warmup == 3


def test_peers_with_an_environment_are_refused_where_ranks_are_started_already():
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = CliRunner().invoke(app, ["bench", "--peer", "nccl-shm"], env=env)
    assert isinstance(result.exception, ArgumentError) and "separate processes" in str(result.exception)


def test_peers_on_unsupported_devices_are_refused():
    assert [name for name, peer in PEERS.items() if peer.serves("host")] == ["gloo", "mpi", "memcpy"]
    on_gpus = ["gloo", "nccl", "nccl-cupy", "nccl-shm", "nccl-socket", "raw"]
    assert [name for name, peer in PEERS.items() if peer.serves("rocm")] == on_gpus


def _numpy(array):
    return array if isinstance(array, np.ndarray) else np.from_dlpack(array)


def _run_by_hand(case, buffers):
    """Every rank's output of a correct library."""
    src = [_numpy(b.src).copy() for b in buffers]
    total = np.sum([s.astype(np.complex128) for s in src], axis=0)
    total = (total if case.dtype.kind == "c" else total.real).astype(src[0].dtype)
    for rank, mine in enumerate(buffers):
        blocks = slice(rank * case.block, (rank + 1) * case.block)
        dst = _numpy(mine.dst)
        match case.op:
            case "all_reduce" | "reduce":
                dst[...] = total
            case "broadcast":
                dst[...] = src[0]
            case "all_gather":
                dst[...] = np.concatenate(src)
            case "reduce_scatter":
                dst[...] = total[blocks]
            case "all_to_all":
                dst[...] = np.concatenate([s[blocks] for s in src])
            case "gather":
                dst[...] = np.concatenate(src) if rank == 0 else dst
            case "scatter":
                dst[...] = src[0][blocks]
            case "sendrecv":
                dst[...] = src[(rank - 1) % case.ranks]
            case "p2p":
                dst[...] = src[0] if rank < 2 else dst
            case "send":
                dst[...] = src[0] if rank == 1 else dst


def _check(op, dtype, memory):
    case = Case(op, 1200, DTYPE[dtype], 3, in_place=True)
    buffers = [allocate(case, memory) for _ in range(3)]
    for rank in range(3):
        fill(case, rank, buffers[rank])
    _run_by_hand(case, buffers)
    assert [wrong(case, rank, buffers[rank]) for rank in range(3)] == [0, 0, 0]
    at = 1 if op == "send" else 0
    dst = _numpy(buffers[at].dst)
    dst[5] = 7 if dst[5] != 7 else 5
    assert wrong(case, at, buffers[at]) == 1
    clear(case, buffers[at])
    assert not _numpy(buffers[at].src).any()


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "uint8", "complex64"])
def test_the_check_accepts_right_results_and_counts_wrong_elements(op, dtype):
    _check(op, dtype, HostMemory())


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex64"])
def test_the_check_does_so_on_torch(op, dtype):
    _check(op, dtype, CpuTorch())


def test_torch_compares_dtypes_that_it_cannot_compute_with():
    memory, dtype = CpuTorch(), DTYPE["float8_e4m3fn"]
    array = memory.zeros(10, dtype)
    values = np.arange(3).astype(dtype.numpy)
    memory.tile(array, values)
    assert memory.differ(array, values) == 0
    assert memory.differ(array, values[:1]) == 6
    assert memory.differ(array[:0], values) == 0


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_the_check_notices_an_operation_that_did_nothing(op, memory):
    case = Case(op, 96, DTYPE["int32"], 2, in_place=False)
    buffers = allocate(case, memory)
    fill(case, 1, buffers)
    expected_untouched = op in ("reduce", "gather")  # rank 1 is not the root
    assert (wrong(case, 1, buffers) == 0) == expected_untouched


def test_sizes_count_as_in_nccl_tests():
    gather = Case("all_gather", 1000, DTYPE["float32"], 3, in_place=True)
    assert (gather.block, gather.count, gather.bytes) == (83, 249, 996)
    assert OPS["all_reduce"](4) == 1.5 and OPS["all_gather"](4) == 0.75


def test_ping_pong_sends_what_was_received():
    order = []

    def turns(operation, rank, times):
        call = operation(rank, lambda x: order.append(f"send {x}"), lambda x: order.append(f"recv {x}"), "in", "out")
        for _ in range(times):
            call()
        done = list(order)
        order.clear()
        return done

    assert turns(one_way, 0, 2) == ["send in"] * 2 and turns(one_way, 1, 2) == ["recv out"] * 2
    assert turns(ping_pong, 0, 3) == ["send in", "recv out", "send out", "recv in", "send in", "recv out"]
    assert turns(ping_pong, 1, 2) == ["recv out", "send out"] * 2


class Clock:
    """A clock that only sleeping moves, in place of the module `time`: another process's load changes no figure."""

    def __init__(self):
        self._seconds = 0.0

    def sleep(self, seconds):
        self._seconds += seconds

    def monotonic(self):
        return self._seconds

    def perf_counter_ns(self):
        return round(self._seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("xvcomm.cli.bench.measure.time", clock)
    monkeypatch.setitem(globals(), "time", clock)


class Sleeper:
    """An operation that takes one millisecond on the host; records its calls."""

    name = "sleeper"
    communicates = False

    def __init__(self):
        self.calls = 0

    def refuses(self, case):
        return "too large" if case.size > 100 else None

    def bind(self, case, buffers):
        def call():
            self.calls += 1
            time.sleep(0.001)

        return call

    def close(self):
        pass


def _measured(memory, op="all_reduce", size=64, **effort):
    case = Case(op, size, DTYPE["float32"], 2, in_place=True)
    sleeper, meeting = Sleeper(), Meeting(MemoryStore(), 0, 1, 10.0)
    how = Effort(patience=0, asynchronous=memory.asynchronous, **effort)
    return sleeper, measure(case, [sleeper], meeting, memory, Bystanders([]), how)


def test_bursts_are_waited_for_once(clock):
    """In a burst of ten calls, each is charged its own time and a tenth of the final wait."""
    sleeper, (record,) = _measured(CpuTorch(), iterations=10, warmup=1)
    assert sleeper.calls == 1 + 3 * 10 and record.iterations == 30
    assert (record.call, record.time, record.waited) == pytest.approx((1000, 1100, 2000))


def test_each_operation_of_the_host_is_timed(clock):
    sleeper, (record,) = _measured(HostMemory(), seconds=0.03, warmup=2)
    assert record.time == record.call == record.waited == pytest.approx(1000)
    assert 9 <= record.iterations < sleeper.calls  # one call warms up, two where they are short
    _, (half,) = _measured(HostMemory(), op="p2p", iterations=2)
    assert half.time == pytest.approx(500)


def test_refused_cases_are_left_out():
    assert _measured(HostMemory(), size=128, iterations=1)[1] == []


def test_json_round_trip(tmp_path):
    _, records = _measured(HostMemory(), iterations=1)
    topology = Topology.from_labels(["cuda", "rocm"])
    setting = Setting.of(topology, ["cuda H", "rocm H"], rehearsal=True)
    assert setting.gpus == "1 x cuda H, 1 x rocm H" and setting.islands == ("cuda", "rocm")
    write_json(tmp_path / "x.json", records, setting)
    assert read_json(tmp_path / "x.json") == records
    (one,) = json.loads((tmp_path / "x.json").read_text())
    assert one.keys() == {f.name for f in (*fields(Record), *fields(Setting))}
    assert Setting.of(topology, ["host x86", "host x86"], rehearsal=False).gpus == ""
    write_csv(tmp_path / "x.csv", records, setting)
    with (tmp_path / "x.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["library"] == records[0].library and float(line["busbw"]) == records[0].busbw
    assert line["islands"] == "cuda,rocm" and line["date"] == setting.date


def test_separate_peers_without_a_temporary_folder(monkeypatch):
    def none(*args, **kwargs):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    arguments = ["bench", "-n", "2", "--device", "cuda", "--peer", "nccl-shm"]
    error = CliRunner().invoke(app, arguments, env={"XVCOMM_DEVICE": ""}).exception
    assert "nccl-shm needs a folder for temporary files" in str(error) and "set TMPDIR" in str(error)


@pytest.mark.parametrize("op", CROSSING)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_schedules_send_across_the_border_what_raw_copies(op, ranks):
    topology = Topology.from_labels("a" * (ranks // 2) + "b" * (ranks // 2))
    case = Case(op, 64 * 4 * ranks, DTYPE["float32"], ranks, True)
    collective, blocks = Collective(op), (case.block,) * ranks
    request = {
        "all_reduce": Request(collective, 4, count=case.count),
        "broadcast": Request(collective, 4, count=case.count, root=0),
        "all_to_all": Request(collective, 4, counts=blocks, recv_counts=blocks),
    }.get(op, Request(collective, 4, counts=blocks))
    for rank in range(ranks):
        other = [r for r in range(ranks) if topology.island_of(r) is not topology.island_of(rank)]
        steps = build(request, topology, rank).steps
        sent = sum(step.src.count * 4 for step in steps if isinstance(step, Put) and step.peer in other)
        assert case.crossing(topology, rank)[0] == sent
    assert case.crossing(Topology.from_labels("aaab"), 0) is None
