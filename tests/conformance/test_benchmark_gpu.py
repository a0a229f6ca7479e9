"""`benchmarks/gpu.py`: a complete run on host memory, and the evaluation of its bars."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from xvcomm.cli.bench.measure import Record

ENV = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
MIB = 1 << 20


@pytest.fixture(scope="module")
def gpu(root):
    """The program as a module."""
    sys.path.insert(0, str(root / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_gpu", root / "benchmarks" / "gpu.py")
        module = sys.modules["benchmark_gpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "benchmarks"))
    return module


def figure(library, op, size, time, call=1.0):
    return Record(
        library=library, op=op, ranks=2, dtype="float32", in_place=True, size=size, count=size // 4, iterations=1,
        time=time, p10=time, p90=time, least=time, call=call, waited=time, algbw=1.0, busbw=1.0, wrong=0, others=0.0,
        noisy=False,
    )  # fmt: skip


def named(gpu, ranks, name):
    return next(s for s in gpu.scenarios(ranks, "cuda", [8, 64 * MIB, 256 * MIB]) if s.name == name)


def test_bar_uses_the_worst_size(gpu):
    times = {"xvcomm": (10, 100, 1000), "raw": (1, 99, 970), "nccl-shm": (1, 150, 1300), "gloo": (1, 2000, 13000)}
    sizes = (8, 64 * MIB, 256 * MIB)
    records = [figure(n, "send", s, t) for n, each in times.items() for s, t in zip(sizes, each, strict=True)]
    found = {bar.what: bar for bar in gpu.bars(named(gpu, 2, "border"), records)}
    assert {what: round(bar.value, 2) for what, bar in found.items()} == {
        "one way, 64 MiB and more, part of raw copies": 0.97,
        "one way, 64 MiB and more, times NCCL without P2P": 1.3,
        "one way, 64 MiB and more, times Gloo": 13.0,
    }
    assert [bar.met for bar in found.values()] == [True, False, True]


def test_round_trips_and_calls_must_be_short(gpu):
    records = [figure("xvcomm", "p2p", 8, 30), figure("nccl", "p2p", 8, 70)]
    (bar,) = gpu.bars(named(gpu, 2, "border-one-queue"), records)
    assert bar.what == "round trip, up to 4 KiB, part of NCCL's, one queue"
    assert bar.met and bar.value == pytest.approx(30 / 70)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_island_is_judged_with_any_number_of_ranks(gpu, ranks):
    island = named(gpu, ranks, "island")
    assert island.islands == ("",) * ranks and "nccl-cupy" in island.peers
    records = [figure("xvcomm", "all_reduce", 8, 10, call=9.0), figure("nccl-cupy", "all_reduce", 8, 10, call=3.5)]
    (bar,) = gpu.bars(island, records)
    assert (bar.value, bar.bound, bar.met) == (5.5, 5, False)
    records = [figure(n, "broadcast", 64 * MIB, t) for n, t in (("xvcomm", 100), ("nccl-cupy", 98))]
    (bar, _) = gpu.bars(island, [*records, *(figure(n, "broadcast", 8, 1) for n in ("xvcomm", "nccl-cupy"))])
    assert bar.value == pytest.approx(0.98) and not bar.met


def test_mixed_sums_are_judged_at_256_mib_and_up_to_1_mib(gpu):
    records = [figure(n, "all_reduce", s, t) for n, t in (("xvcomm", 10), ("nccl-shm", 41)) for s in (8, 256 * MIB)]
    large, short = gpu.bars(named(gpu, 4, "mixed"), records)
    assert large.value == pytest.approx(4.1) and large.met
    assert short.value == pytest.approx(10 / 41) and short.met


def test_other_mixed_collectives_are_judged_beside_nccl_and_raw_copies(gpu):
    times = {"xvcomm": 10, "nccl-shm": 19, "raw": 9}
    records = [figure(n, "all_gather", s, t) for n, t in times.items() for s in (MIB, 64 * MIB)]
    beside, part = gpu.bars(named(gpu, 4, "mixed-others"), records)
    assert beside.value == pytest.approx(1.9) and not beside.met
    assert part.value == pytest.approx(0.9) and part.met


@pytest.mark.parametrize(
    "ranks, names",
    [
        (2, ["border", "island", "border-one-queue"]),
        pytest.param(4, ["mixed", "island", "mixed-others-gloo"], marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_run_on_host_memory(root, python, tmp_path, ranks, names):
    """All measurements for which peers are installed appear in all files."""
    pytest.importorskip("torch")
    command = [python, str(root / "benchmarks" / "gpu.py"), "--device", "host", "--ranks", str(ranks)]
    limits = ["--sizes", "8,4K", "--budget", "2", "--only", ",".join(names), "--out", str(tmp_path)]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, env=ENV, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / f"gpu{ranks}.json").read_text())["records"]
    assert list(dict.fromkeys(r["scenario"] for r in records)) == names
    assert all(r["connections"] == ("1" if r["scenario"].endswith("one-queue") else "") for r in records)
    assert any(r["library"] == "gloo" for r in records) and not any(r["wrong"] for r in records)
    assert records[0]["rehearsal"] and records[0]["islands"] == ["cuda"] * (ranks // 2) + ["rocm"] * (ranks // 2)
    page = (tmp_path / f"gpu{ranks}.md").read_text()
    assert "| 4 KiB |" in page and f"gpu{ranks}.png" in page
    assert (tmp_path / f"gpu{ranks}.png").read_bytes().startswith(b"\x89PNG")
    assert "GB/s; call: µs of the host" in done.stdout
