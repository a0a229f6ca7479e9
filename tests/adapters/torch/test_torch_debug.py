"""TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's profiler, and xvcomm's flight recorder."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torchchecks import close, loss_of, me, mean_gradients, noise, perceptron, same, size
from torchjobs import BACKEND, Job

from xvcomm.trace import recorder
from xvcomm.trace.format import Record

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def everything() -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    n = size()
    dist.all_reduce(x := torch.ones(3))
    same(x, torch.full((3,), float(n)))
    dist.all_gather_into_tensor(out := torch.zeros(2 * n), noise(me(), 2))
    same(out, torch.cat([noise(rank, 2) for rank in range(n)]))
    dist.reduce_scatter_tensor(out := torch.zeros(1), torch.ones(n))
    same(out, [float(n)])
    dist.broadcast(x := noise(me(), 4), 1)
    same(x, noise(1, 4))
    dist.barrier()
    if me() == 0:
        dist.send(noise(0, 4), 1, tag=3)
    elif me() == 1:
        dist.recv(x := torch.zeros(4), 0, tag=3)
        same(x, noise(0, 4))
    group = dist.new_group([0, 1])
    if me() < 2:
        dist.all_reduce(x := torch.ones(1), group=group)
        same(x, [2.0])
    model = nn.parallel.DistributedDataParallel(perceptron())
    loss_of(model, me()).backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(), strict=True):
        close(parameter.grad, expected)


@pytest.mark.not_gloo("DDP under DETAIL, which crashes there in torch 2.13")
def test_detail(start: Callable[..., Job]) -> None:
    start("cuda:1,rocm:1", env=DETAIL).run(everything)


def unlike() -> str:
    try:
        dist.all_reduce(torch.ones(4 + me()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_debug_detail_reports_mismatches(start: Callable[..., Job]) -> None:
    for text in start("cuda:1,rocm:1", env=DETAIL).run(unlike):
        assert text


def unlike_models() -> str:
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4 + me()))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_models_of_different_shapes_are_reported(start: Callable[..., Job], level: str) -> None:
    job = start("cuda:1,rocm:1", env={"TORCH_DISTRIBUTED_DEBUG": level}, timeout=3.0)
    texts = job.run(unlike_models)
    assert any("param" in text and "size" in text for text in texts), texts


def profiled() -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_gather_into_tensor(torch.zeros(4 * size()), torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
        dist.barrier()
        if me() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
    return [event.name for event in profile.events()]


def test_operations_are_events_of_the_profiler(pair: Job) -> None:
    sender, receiver = pair.run(profiled)
    assert sender.count(f"{BACKEND}:all_reduce") == 2
    assert f"{BACKEND}:broadcast" in sender
    assert any(name.startswith(f"{BACKEND}:") and "gather" in name for name in sender)
    assert f"{BACKEND}:send" in sender and f"{BACKEND}:recv" in receiver


def calls(n: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Every entry point of a group of two, and the profiler event that it records."""
    group, x, wide = dist.group.WORLD, torch.ones(2), torch.ones(2 * n)
    parts, mine, other = [torch.ones(2) for _ in range(n)], me() == 0, 1 - me()

    def coalesced() -> None:
        with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            dist.isend(x, other)
            dist.irecv(x.clone(), other)
        manager.wait()

    def from_any() -> None:
        if mine:
            dist.send(x, 1)
        else:
            dist.recv(x.clone())

    return {
        "all_reduce": ("all_reduce", lambda: dist.all_reduce(x)),
        "all_reduce, async": ("all_reduce", lambda: dist.all_reduce(x, async_op=True).wait()),
        "all_reduce of several": ("all_reduce", lambda: group.allreduce_coalesced([x, x]).wait()),
        "all_reduce, sparse": ("all_reduce", lambda: dist.all_reduce(torch.eye(2).to_sparse())),
        "broadcast": ("broadcast", lambda: dist.broadcast(x, 0)),
        "broadcast of several": ("broadcast", lambda: group.broadcast([x, x]).wait()),
        "reduce": ("reduce", lambda: dist.reduce(x, 0)),
        "all_gather": ("all_gather", lambda: dist.all_gather(parts, x)),
        "all_gather_coalesced": ("all_gather", lambda: dist.all_gather_coalesced([[p] for p in parts], [x])),
        "all_gather_into_tensor": ("_allgather_base", lambda: dist.all_gather_into_tensor(wide, x)),
        "all_gather_into_tensor of several": (
            "allgather_into_tensor_coalesced", lambda: group.allgather_into_tensor_coalesced([wide], [x]).wait()
        ),
        "reduce_scatter": ("reduce_scatter", lambda: dist.reduce_scatter(x, parts)),
        "reduce_scatter_tensor": ("_reduce_scatter_base", lambda: dist.reduce_scatter_tensor(x, wide)),
        "reduce_scatter_tensor of several": (
            "reduce_scatter_tensor_coalesced", lambda: group.reduce_scatter_tensor_coalesced([x], [wide]).wait()
        ),
        "gather": ("gather", lambda: dist.gather(x, parts if mine else None, 0)),
        "scatter": ("scatter", lambda: dist.scatter(x, parts if mine else None, 0)),
        "all_to_all": ("all_to_all", lambda: dist.all_to_all(parts, [p.clone() for p in parts])),
        "all_to_all_single": ("all_to_all", lambda: dist.all_to_all_single(wide.clone(), wide)),
        "barrier": ("barrier", dist.barrier),
        "monitored_barrier": ("monitored_barrier", dist.monitored_barrier),
        "send and recv": (
            "send" if mine else "recv", lambda: dist.send(x, 1) if mine else dist.recv(x.clone(), 0)
        ),
        "isend and irecv": (
            "send" if mine else "recv", lambda: (dist.isend(x, 1) if mine else dist.irecv(x.clone(), 0)).wait()
        ),
        "recv from any": ("send" if mine else "recvAnySource", from_any),
        "coalesced messages": ("coalesced", coalesced),
    }  # fmt: skip


def events() -> dict[str, tuple[str, list[str]]]:
    """For each call: the expected event, and the backend's events that the profiler recorded."""
    found = {}
    for name, (event, call) in calls(size()).items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            call()
        seen = [e.name for e in profile.events() if e.name.startswith(f"{BACKEND}:")]
        found[name] = f"{BACKEND}:{event}", seen
    return found


@pytest.mark.not_gloo("events of all kinds, and by these names")
def test_every_operation_is_one_event_of_the_profiler(pair: Job) -> None:
    for found in pair.run(events):
        for name, (event, seen) in found.items():
            expected = [event] if name != "coalesced messages" else [f"{BACKEND}:send", f"{BACKEND}:recv", event]
            assert seen == expected, name


def sized() -> dict[str, dict[str, Any]]:
    """For each event of the backend: what a trace for Perfetto tells of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.all_gather([torch.ones(5, dtype=torch.float64) for _ in range(size())], torch.ones(5, dtype=torch.float64))
        dist.broadcast(torch.ones(2, dtype=torch.bfloat16), 0, async_op=True).wait()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return {event["name"]: event["args"] for event in trace if str(event.get("name")).startswith(f"{BACKEND}:")}


@pytest.mark.not_gloo("bytes, and by these names")
def test_events_of_the_profiler_have_shapes_and_bytes(pair: Job) -> None:
    for found in pair.run(sized):
        told = {name.partition(":")[2]: (a["Input Dims"], a["Input type"], a["bytes"]) for name, a in found.items()}
        assert told == {
            "all_reduce": ([[3, 4]], ["float"], 48),
            "all_gather": ([[5]], ["double"], 40),
            "broadcast": ([[2]], ["c10::BFloat16"], 4),
        }


def logged() -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(perceptron())
    loss_of(model, me()).backward()
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def test_ddp_logging_names_the_backend(pair: Job) -> None:
    for data in pair.run(logged):
        assert data["backend_name"] == BACKEND
        assert data["world_size"] == 2


def places() -> list[str]:
    """Call sites of operations in the flight recorder."""
    records: list[Record] = []
    recorder.hooks.append(records.append)
    try:
        dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None] * size(), me())
        dist.all_gather_into_tensor(torch.empty(size()), torch.ones(1))  # deprecated: a wrapper's line lies between
        dist.all_gather_into_tensor(torch.empty(size()), torch.ones(1), async_op=True).wait()
        with dist._coalescing_manager():  # calls when the block ends, by way of contextlib
            dist.all_reduce(torch.ones(1))
    finally:
        recorder.hooks.remove(records.append)
    return [record.call_site for record in records]


@pytest.mark.not_gloo("a flight recorder")
def test_the_flight_recorder_names_the_line_of_the_program(pair: Job) -> None:
    first = places.__code__.co_firstlineno + 5
    for call_sites in pair.run(places):
        assert set(call_sites) == {f"test_torch_debug.py:{first + n}" for n in range(5)}, call_sites


def line(function: Callable[..., Any], text: str) -> str:
    """Call site of a statement in a function of this file, as the flight recorder formats it."""
    lines, first = inspect.getsourcelines(function)
    return f"test_torch_debug.py:{first + next(n for n, found in enumerate(lines) if text in found)}"


def recorded_call_sites(program: Callable[[], object]) -> set[str]:
    records: list[Record] = []
    recorder.hooks.append(records.append)
    try:
        program()
    finally:
        recorder.hooks.remove(records.append)
    return {record.call_site for record in records}


def started() -> None:
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    dist.barrier()  # behind them, in the group's thread
    received = dist.irecv(torch.zeros(1)) if me() else dist.isend(torch.ones(1), 1)
    for work in (*works, received):
        work.wait()


def stepped() -> None:
    model = nn.parallel.DistributedDataParallel(perceptron(), bucket_cap_mb=0.0005)
    loss = loss_of(model, me())
    loss.backward()


def started_call_sites() -> list[set[str]]:
    return [recorded_call_sites(program) for program in (started, stepped)]


@pytest.mark.not_gloo("a flight recorder")
def test_the_flight_recorder_names_the_line_that_started_what_a_thread_runs(pair: Job) -> None:
    for of_calls, of_ddp in pair.run(started_call_sites):
        assert of_calls == {line(started, text) for text in ("all_reduce", "barrier", "irecv")}, of_calls
        assert of_ddp == {line(stepped, text) for text in ("DistributedDataParallel", "backward")}, of_ddp


def unlike_started() -> str:
    work = dist.all_reduce(torch.ones(2 + me()), async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.not_gloo("descriptions of both calls")
def test_a_mismatch_names_the_line_that_started_it(start: Callable[..., Job]) -> None:
    for text in start("cuda:1,rocm:1").run(unlike_started):
        assert f"all_reduce #0 at {line(unlike_started, 'all_reduce')}" in text, text
