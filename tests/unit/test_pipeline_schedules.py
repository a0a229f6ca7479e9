"""The four schedules: every size passes the check, computes everything once, and has the cost stated in the papers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm import pipeline
from xvcomm.errors import ArgumentError, ScheduleError
from xvcomm.pipeline import Backward, BackwardInput, BackwardWeight, Forward, Message, bubble, build, check

STAGES = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 16)


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(pipeline.SCHEDULES)))
    stages, micro_batches, chunks = draw(STAGES), draw(MICRO_BATCHES), 1
    if name == "interleaved":
        chunks = draw(st.integers(1, 4))
        micro_batches = stages * draw(st.integers(1, 4))
    return build(name, stages, micro_batches, chunks)


def computations(program):
    return [item for item in program if isinstance(item, pipeline.actions.Compute)]


@given(schedule=schedules())
def test_every_schedule_passes_the_proof(schedule):
    report = check(schedule)
    borders = schedule.depth - 1 if schedule.stages > 1 else 0
    assert report.messages == 2 * borders * schedule.micro_batches


@given(schedule=schedules())
def test_every_micro_batch_goes_once_through_every_stage(schedule):
    for program in schedule.programs:
        found = Counter(computations(program))
        everything = [(m, c) for m in range(schedule.micro_batches) for c in range(schedule.chunks)]
        backwards = (BackwardInput, BackwardWeight) if schedule.name == "zero-bubble" else (Backward,)
        assert found == Counter(kind(*place) for kind in (Forward, *backwards) for place in everything)


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_activations_held(stages, micro_batches):
    def held(name):
        return check(build(name, stages, micro_batches)).activations

    assert held("gpipe") == (micro_batches,) * stages
    assert held("1f1b") == tuple(min(stages - rank, micro_batches) for rank in range(stages))
    assert held("zero-bubble") == (min(stages, micro_batches),) * stages


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_bubbles_are_those_of_the_papers(stages, micro_batches):
    def idle(name):
        return bubble(build(name, stages, micro_batches))

    assert idle("gpipe") == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert idle("1f1b") == pytest.approx(idle("gpipe"))
    if micro_batches >= stages:
        # Forward, input gradient and weight gradient take one unit each: (p - 1)(F + B - W) remain idle.
        assert idle("zero-bubble") == pytest.approx((stages - 1) / (3 * micro_batches + stages - 1))
    if stages > 1:
        assert idle("zero-bubble") < idle("1f1b")


@given(stages=STAGES, rounds=st.integers(1, 3), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble(stages, rounds, chunks):
    schedule = build("interleaved", stages, rounds * stages, chunks)
    assert bubble(schedule) == pytest.approx((stages - 1) / (stages - 1 + rounds * stages * chunks))


def test_interleaved_with_one_chunk_is_1f1b():
    assert build("interleaved", 4, 8).programs == build("1f1b", 4, 8).programs


def test_weights_of_the_bubble_can_be_measured_ones():
    schedule = build("zero-bubble", 4, 8)
    assert bubble(schedule, forward=1, backward=2.5, weight=1) == pytest.approx(4.5 / (8 * 3.5 + 4.5))
    assert bubble(schedule, message=0.5) > bubble(schedule)
    with pytest.raises(ArgumentError, match="0 < weight < backward"):
        bubble(schedule, backward=1, weight=1)


@pytest.mark.parametrize("name", sorted(pipeline.SCHEDULES))
def test_receives_are_posted_ahead(name):
    """In the steady state a receive stands before a computation that does not need it, so that both overlap."""
    schedule = build(name, 4, 16, 2 if name == "interleaved" else 1)
    program = schedule.programs[2]
    ahead = 0
    for position, item in enumerate(program):
        if isinstance(item, Message) and not item.sends:
            following = next(a for a in program[position:] if isinstance(a, pipeline.actions.Compute))
            ahead += schedule.carried(2, item) not in schedule.requires(2, following)
    assert ahead >= 16
    assert max(check(schedule).buffers) <= 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("pipedream", 2, 2), "unknown pipeline schedule 'pipedream'; use one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "stages >= 1"),
        (("gpipe", 2, 0), "micro_batches >= 1"),
        (("interleaved", 2, 2, 0), "chunks >= 1"),
        (("1f1b", 2, 2, 2), "use interleaved"),
        (("interleaved", 4, 6, 2), "6 micro-batches are not a multiple of 4 stages"),
    ],
)
def test_sizes_refused(arguments, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        build(*arguments)


def test_orders_that_wait_for_each_other_are_refused():
    orders = [[Forward(0, 0), Backward(0, 0)], [Backward(0, 0), Forward(0, 0)]]
    with pytest.raises(ScheduleError, match=r"rank 0 never starts Backward\(micro_batch=0, chunk=0\)"):
        pipeline.add_messages(pipeline.Layout(2, 1, 1), orders)


def test_custom_orders_get_messages():
    """A schedule of one's own: last micro-batch first on the way back."""
    layout = pipeline.Layout(3, 4, 1)
    order = [Forward(m, 0) for m in range(4)] + [Backward(m, 0) for m in reversed(range(4))]
    schedule = pipeline.Schedule(3, 4, 1, "own", pipeline.add_messages(layout, [order] * 3))
    assert check(schedule).messages == 16
