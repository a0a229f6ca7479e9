"""`run` on ranks that are threads, connected by the strictest communicator that satisfies the contract.

The `Fabric` transfers each rank's messages one after the other (those of a group together), and a message only once
both ranks have posted it. Schedules that `check` accepts must complete on it; those that deadlock on it `check` must reject.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm import pipeline
from xvcomm.errors import Aborted, ArgumentError, MismatchError, ScheduleError, XvcommError
from xvcomm.pipeline import Message, Pipeline, build, check, run

HANG_SECONDS = 30
WIDTHS = [6, 5, 7, 4, 6, 3, 5, 4, 6]
BATCH = 3


class Item:
    """Messages that a rank posted together."""

    def __init__(self, fabric, messages):
        self.fabric, self.waiting = fabric, list(messages)

    def done(self):
        return not self.waiting


class Fabric:
    """One queue of posted items per rank; only the heads progress."""

    def __init__(self, size):
        self.queues = [[] for _ in range(size)]
        self.changed = threading.Condition()
        self.objects = defaultdict(list)
        self.aborted = None
        self.most_open = [0] * size

    def post(self, rank, messages):
        item = Item(self, messages)
        with self.changed:
            self.queues[rank].append(item)
            self._progress()
            sends = sum(m[0] for queued in self.queues[rank] for m in queued.waiting)
            self.most_open[rank] = max(self.most_open[rank], sends)
        return item

    def _progress(self):
        while any(self._pass_one(rank, queue[0]) for rank, queue in enumerate(self.queues) if queue):
            for queue in self.queues:
                while queue and queue[0].done():
                    queue.pop(0)
            self.changed.notify_all()

    def _pass_one(self, rank, item):
        for message in item.waiting:
            sends, peer, tag, array = message
            if sends and self.queues[peer]:
                receives = [m for m in self.queues[peer][0].waiting if m[:2] == (False, rank)]
                firsts = [m for m in item.waiting if m[:2] == (True, peer)]
                if receives and firsts[0] is message:
                    if (tag, array.shape, array.dtype) != (receives[0][2], receives[0][3].shape, receives[0][3].dtype):
                        raise MismatchError(f"rank {rank} sent tag {tag}, rank {peer} expected {receives[0][2]}")
                    receives[0][3][...] = array
                    self.queues[peer][0].waiting.remove(receives[0])
                    item.waiting.remove(message)
                    return True
        return False

    def until(self, condition):
        with self.changed:
            arrived = self.changed.wait_for(lambda: self.aborted or condition(), HANG_SECONDS)
        if self.aborted:
            raise Aborted(self.aborted)
        assert arrived, "hangs"


class Pending:
    def __init__(self, array):
        self.array, self.item = array, None

    def done(self):
        return self.item.done()

    def wait(self):
        self.item.fabric.until(self.done)
        return self.array


class Comm:
    """One rank of a fabric."""

    def __init__(self, fabric, rank):
        self.fabric, self.rank, self.size = fabric, rank, len(fabric.queues)
        self._together = None

    def _post(self, message):
        pending = Pending(message[3])
        if self._together is None:
            pending.item = self.fabric.post(self.rank, [message])
        else:
            self._together.append((message, pending))
        return pending

    def isend(self, x, dst, tag=0):
        return self._post((True, dst, tag, x))

    def irecv(self, buf, src, tag=0):
        return self._post((False, src, tag, buf))

    @contextmanager
    def group(self):
        self._together = []
        yield
        posted, self._together = self._together, None
        item = self.fabric.post(self.rank, [message for message, _ in posted])
        for _, pending in posted:
            pending.item = item

    def send_object(self, obj, dst):
        with self.fabric.changed:
            self.fabric.objects[self.rank, dst].append(obj)
            self.fabric.changed.notify_all()

    def recv_object(self, src):
        self.fabric.until(lambda: self.fabric.objects[src, self.rank])
        return self.fabric.objects[src, self.rank].pop(0)

    def abort(self, reason):
        with self.fabric.changed:
            self.fabric.aborted = reason
            self.fabric.changed.notify_all()


class Linear:
    """y = tanh(x w); the last stage's loss is half the squared distance to a target."""

    def __init__(self, number, depth):
        draw = np.random.default_rng(number)
        self.number, self.last = number, number == depth - 1
        self.w = draw.normal(size=(WIDTHS[number], WIDTHS[number + 1])) / 2
        self.dw = np.zeros_like(self.w)
        self.input_spec = ((BATCH, WIDTHS[number]), "float64")
        self.output_spec = ((BATCH, WIDTHS[number + 1]), "float64")
        self.saved, self.halves = {}, {}

    def data(self, micro_batch, columns):
        return np.random.default_rng((columns, micro_batch)).normal(size=(BATCH, columns))

    def forward(self, x, micro_batch):
        x = self.data(micro_batch, WIDTHS[0]) if self.number == 0 else x.copy()
        y = np.tanh(x @ self.w)
        self.saved[micro_batch] = x, y
        return 0.5 * ((y - self.data(micro_batch, y.shape[1])) ** 2).sum() if self.last else y

    def backward_input(self, dy, micro_batch):
        x, y = self.saved.pop(micro_batch)
        dy = y - self.data(micro_batch, y.shape[1]) if self.last else dy.copy()
        dz = dy * (1 - y * y)
        self.halves[micro_batch] = x, dz
        return dz @ self.w.T if self.number else None

    def backward_weight(self, micro_batch):
        x, dz = self.halves.pop(micro_batch)
        self.dw += x.T @ dz

    def backward(self, dy, micro_batch):
        dx = self.backward_input(dy, micro_batch)
        self.backward_weight(micro_batch)
        return dx

    def empty(self, shape, dtype):
        return np.full(shape, np.nan, dtype)


def alone(depth, micro_batches):
    """Losses and weight gradients of all stages in one process."""
    stages = [Linear(number, depth) for number in range(depth)]
    losses = []
    for m in range(micro_batches):
        x = dy = None
        for stage in stages:
            x = stage.forward(x, m)
        losses.append(x)
        for stage in reversed(stages):
            dy = stage.backward(dy, m)
    return losses, [stage.dw for stage in stages]


def on_ranks(size, work):
    """Run `work(comm)` on each rank; returns results or errors in rank order, and the fabric."""
    fabric = Fabric(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, Comm(fabric, rank)) for rank in range(size)]
        return [future.exception(HANG_SECONDS) or future.result() for future in futures], fabric


CASES = [
    *(("gpipe", 1, 1, 1), ("gpipe", 4, 3, 1)),
    *(("1f1b", 1, 3, 1), ("1f1b", 2, 1, 1), ("1f1b", 4, 2, 1), ("1f1b", 4, 7, 1)),
    *(("interleaved", 1, 3, 3), ("interleaved", 2, 4, 2), ("interleaved", 2, 2, 4), ("interleaved", 4, 8, 2)),
    *(("zero-bubble", 1, 2, 1), ("zero-bubble", 3, 2, 1), ("zero-bubble", 4, 6, 1)),
]


@pytest.mark.parametrize("open_sends", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_same_losses_and_gradients_as_one_process(case, open_sends):
    schedule = build(*case)
    losses, gradients = alone(schedule.depth, schedule.micro_batches)

    def work(comm):
        stages = [Linear(schedule.stage(comm.rank, c), schedule.depth) for c in range(schedule.chunks)]
        pipe = Pipeline(stages if schedule.chunks > 1 else stages[0], comm, schedule, open_sends=open_sends)
        first = pipe.run()
        assert pipe.run() == first  # the weights did not change
        return first, stages

    results, fabric = on_ranks(schedule.stages, work)
    for rank, (given_losses, stages) in enumerate(results):
        assert given_losses == (losses if rank == schedule.stages - 1 else [])
        for stage in stages:
            assert not stage.saved and not stage.halves
            np.testing.assert_allclose(stage.dw, 2 * gradients[stage.number], rtol=1e-13)
    assert all(most <= open_sends for most in fabric.most_open)


def test_ranks_may_be_any_in_any_order():
    """Two pipelines of two ranks in one communicator of four, as data parallelism has them."""
    schedule = build("1f1b", 2, 4)
    losses, gradients = alone(2, 4)
    chains = [(3, 0), (1, 2)]

    def work(comm):
        ranks = next(chain for chain in chains if comm.rank in chain)
        stage = Linear(ranks.index(comm.rank), 2)
        return run(stage, comm, schedule, ranks=ranks), stage

    results, _ = on_ranks(4, work)
    for first, last in chains:
        assert results[first][0] == [] and results[last][0] == losses
        np.testing.assert_allclose(results[first][1].dw, gradients[0], rtol=1e-13)


def runs_to_end(schedule):
    """Whether a schedule goes through the fabric, step by step and without threads, every value meeting its own."""
    fabric = Fabric(schedule.stages)
    here = [{} for _ in schedule.programs]
    places = [0] * schedule.stages

    def step(rank):
        item = schedule.programs[rank][places[rank]]
        messages = item.messages if isinstance(item, pipeline.Group) else [item] if isinstance(item, Message) else []
        posted, received = [], {}
        for action in messages or [item]:
            for value in schedule.requires(rank, action):
                if value not in here[rank] or not here[rank][value].done():
                    return False
            if isinstance(action, Message):
                value = schedule.carried(rank, action)
                posted.append((action.sends, action.peer, schedule.tag(value), np.zeros(1)))
                received.update({} if action.sends else {value: None})
        handle = fabric.post(rank, posted) if messages else Item(fabric, [])
        produced = received or [schedule.provides(rank, item)] * (not messages)
        here[rank].update(dict.fromkeys(produced, handle))
        places[rank] += 1
        return True

    try:
        while any(step(r) for r in range(schedule.stages) if places[r] < len(schedule.programs[r])):
            pass
    except MismatchError:
        return False
    return all(places[r] == len(p) for r, p in enumerate(schedule.programs)) and not any(fabric.queues)


@settings(max_examples=600)
@given(
    case=st.sampled_from([c for c in CASES if c[1] > 1]),
    data=st.data(),
    exchanges=st.integers(0, 3),
    distance=st.integers(1, 4),
)
def test_check_agrees_with_execution(case, data, exchanges, distance):
    schedule = build(*case)
    programs = [list(program) for program in schedule.programs]
    for _ in range(exchanges):
        program = data.draw(st.sampled_from(programs))
        at = data.draw(st.integers(0, len(program) - 1))
        to = min(at + distance, len(program) - 1)
        program[at], program[to] = program[to], program[at]
    changed = replace(schedule, programs=tuple(map(tuple, programs)))
    try:
        check(changed)
    except ScheduleError as error:
        assert not runs_to_end(changed), error
        assert any(str(action) in str(error) for p in changed.programs for _, action in pipeline.actions.flatten(p))
    else:
        assert runs_to_end(changed)


def everyone_raises(size, work, kind, complaint):
    results, _ = on_ranks(size, work)
    assert all(isinstance(result, kind) for result in results), results
    assert all(complaint in str(result) for result in results), results


def unwanted(*arguments):
    raise AssertionError("a step began")


def test_stages_that_disagree_raise_everywhere_before_the_first_step():
    def work(comm):
        stage = Linear(comm.rank, 3)
        if comm.rank == 1:
            stage.input_spec = ((BATCH, 99), "float64")
        stage.forward = unwanted
        return run(stage, comm, build("1f1b", 3, 2))

    everyone_raises(3, work, ScheduleError, "gives 3 x 5 float64, the output of stage 0, where rank 1: RecvActivation")


def test_different_schedules_raise_everywhere():
    def work(comm):
        return run(Linear(comm.rank, 2), comm, build("1f1b" if comm.rank else "gpipe", 2, 2))

    everyone_raises(2, work, MismatchError, "position 0 has the schedule gpipe for 2 ranks")
    everyone_raises(2, work, MismatchError, "; position 1 has 1f1b for 2 ranks x 1 chunks with 2 micro-batches")


def test_zero_bubble_needs_a_stage_that_splits():
    class Whole(Linear):
        backward_weight = None

    def work(comm):
        return run((Linear, Whole)[comm.rank](comm.rank, 2), comm, build("zero-bubble", 2, 2))

    lack = "stage 1 (Whole) has no method backward_weight(micro_batch), which schedule zero-bubble needs; add it, or use 1f1b"
    everyone_raises(2, work, ArgumentError, lack)


MEMBERS = {
    "input_spec": "input_spec, a (shape, dtype name) pair",
    "output_spec": "output_spec, a (shape, dtype name) pair",
    "forward": "method forward(x, micro_batch)",
    "backward": "method backward(dy, micro_batch)",
    "empty": "method empty(shape, dtype)",
}


@pytest.mark.parametrize("absent", MEMBERS)
def test_a_stage_that_lacks_a_member_raises_everywhere_before_the_first_step(absent):
    class Partial:
        def __init__(self):
            for name in MEMBERS.keys() - {absent}:
                setattr(self, name, ((BATCH, 4), "float64") if name.endswith("spec") else unwanted)

    def work(comm):
        stage = Partial() if comm.rank == 1 else Linear(comm.rank, 3)
        stage.forward = unwanted if absent != "forward" or comm.rank != 1 else None
        return run(stage, comm, build("1f1b", 3, 2))

    message = f"pipeline position 1: stage 1 (Partial) has no {MEMBERS[absent]}, which schedule 1f1b needs; add it"
    everyone_raises(3, work, ArgumentError, message)


def test_a_stage_needs_only_what_its_schedule_calls():
    """One rank receives nothing, and the two halves stand in for the whole backward pass."""

    class Halves(Linear):
        backward = empty = None

    def work(comm):
        return run(Halves(0, 1), comm, build("zero-bubble", 1, 2))

    results, _ = on_ranks(1, work)
    assert results[0] == alone(1, 2)[0]


def test_wrong_number_of_stages_or_missing_spec_raises_everywhere():
    def few(comm):
        return run([Linear(comm.rank, 4)], comm, build("interleaved", 2, 2, 2))

    everyone_raises(2, few, ArgumentError, "1 stages given, but schedule interleaved has 2 chunks per rank")

    def silent(comm):
        stage = Linear(comm.rank, 2)
        if comm.rank == 0:
            del stage.output_spec
        return run(stage, comm, build("1f1b", 2, 2))

    everyone_raises(2, silent, ArgumentError, "output_spec")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "is for 2 ranks, the pipeline has 3"),
        ({"ranks": (0, 0)}, "must be different ranks"),
        ({"ranks": (0, 3)}, "must be different ranks from 0 to 2"),
        ({"ranks": (1, 2)}, "rank 0 is not in this pipeline"),
        ({"ranks": (0, 1), "open_sends": 0}, "open_sends must be at least 1"),
    ],
)
def test_arguments_refused(options, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        Pipeline(Linear(0, 2), Comm(Fabric(3), 0), build("1f1b", 2, 2), **options)


def test_a_stage_that_raises_ends_all_ranks():
    class Broken(Linear):
        def backward(self, dy, micro_batch):
            if micro_batch == 1:
                raise ZeroDivisionError("out of luck")
            return super().backward(dy, micro_batch)

    def work(comm):
        return run((Linear, Broken, Linear)[comm.rank](comm.rank, 3), comm, build("1f1b", 3, 4))

    (first, second, third), _ = on_ranks(3, work)
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, Aborted)
        assert "Backward(micro_batch=1, chunk=0) of pipeline position 1 raised ZeroDivisionError" in str(other)


def test_an_array_other_than_declared_ends_all_ranks():
    class Careless(Linear):
        def forward(self, x, micro_batch):
            return super().forward(x, micro_batch).astype(np.float32)

    def work(comm):
        return run((Careless, Linear)[comm.rank](comm.rank, 2), comm, build("1f1b", 2, 2))

    (first, second), _ = on_ranks(2, work)
    assert isinstance(first, ScheduleError)
    assert str(first).startswith(
        "the output of stage 0 for micro-batch 0 is 3 x 5 float32, but the stage declared 3 x 5 float64"
    )
    assert isinstance(second, Aborted) and isinstance(second, XvcommError)
