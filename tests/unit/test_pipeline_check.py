"""What `check` rejects, and how it names the invalid action."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm import pipeline
from xvcomm.errors import ArgumentError, ScheduleError
from xvcomm.pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Group,
    Message,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Spec,
    StageSpec,
    build,
    check,
)

SIZES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 4, 5, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 4, 8, 2),
    ("zero-bubble", 4, 6, 1),
]


@st.composite
def places(draw):
    """A schedule, a rank, and the position of one action in the rank's program without groups."""
    schedule = build(*draw(st.sampled_from(SIZES)))
    rank = draw(st.integers(0, schedule.stages - 1))
    actions = [action for _, action in pipeline.actions.flatten(schedule.programs[rank])]
    return schedule, rank, actions, draw(st.integers(0, len(actions) - 1))


def with_program(schedule, rank, program):
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def refusal(schedule, specs=None):
    with pytest.raises(ScheduleError) as caught:
        check(schedule, specs)
    return str(caught.value)


@given(place=places())
def test_a_dropped_action_is_named(place):
    schedule, rank, actions, at = place
    kept = actions[:at] + actions[at + 1 :]
    assert refusal(with_program(schedule, rank, kept)) == f"rank {rank}: {actions[at]} is missing"


@given(place=places(), to=st.integers(0, 1000))
def test_a_duplicated_action_is_named(place, to):
    schedule, rank, actions, at = place
    to %= len(actions) + 1
    doubled = [*actions[:to], actions[at], *actions[to:]]
    assert refusal(with_program(schedule, rank, doubled)).startswith(f"rank {rank}: {actions[at]} occurs 2 times")


@given(place=places(), data=st.data())
def test_an_action_that_does_not_belong_is_named(place, data):
    schedule, rank, actions, at = place
    changes = [{"micro_batch": schedule.micro_batches}, {"chunk": schedule.chunks}]
    if isinstance(actions[at], Message):
        changes.append({"peer": (actions[at].peer + 1) % (schedule.stages + 1)})
    foreign = replace(actions[at], **data.draw(st.sampled_from(changes)))
    changed = [*actions[:at], foreign, *actions[at + 1 :]]
    assert refusal(with_program(schedule, rank, changed)).startswith(f"rank {rank}: {foreign} does not belong in")


@given(place=places())
def test_an_action_before_what_it_needs_is_named(place):
    schedule, rank, actions, at = place
    needs = schedule.requires(rank, actions[at])
    earlier = [i for i in range(at) if schedule.provides(rank, actions[i]) in needs]
    if not earlier:
        return
    swapped = list(actions)
    swapped.insert(earlier[0], swapped.pop(at))
    assert refusal(with_program(schedule, rank, swapped)).startswith(f"rank {rank}: {actions[at]} comes before the ")


@given(place=places())
def test_messages_of_one_channel_in_another_order_are_named(place):
    schedule, rank, actions, at = place
    one = actions[at]
    if not isinstance(one, Message) or one.sends:
        return
    later = [i for i in range(at + 1, len(actions)) if type(actions[i]) is type(one) and actions[i].peer == one.peer]
    if not later:
        return
    other = actions[later[0]]
    early = list(actions)
    early.insert(at, early.pop(later[0]))  # receives may come any time earlier
    text = refusal(with_program(schedule, rank, early))
    assert re.search(rf"message \d+ from rank {one.peer} to rank {rank}: ", text)
    assert f"rank {rank} does {other}; messages between two ranks match in order" in text


def two_ranks(first, second):
    return pipeline.Schedule(2, len([a for a in second if isinstance(a, Forward)]), 1, "own", (first, second))


SECOND = (RecvActivation(0, 0, 0), Forward(0, 0), Backward(0, 0), SendGradient(0, 0, 0))


def test_a_receive_before_the_send_it_depends_on_deadlocks():
    first = (Forward(0, 0), RecvGradient(0, 0, 1), SendActivation(0, 0, 1), Backward(0, 0))
    text = refusal(two_ranks(first, SECOND))
    assert text.startswith("schedule own deadlocks: ")
    circle = re.split(", which waits for | waits for ", text.removeprefix("schedule own deadlocks: "))
    assert circle[0] == circle[-1]
    start = circle.index("rank 0: the end of RecvGradient(micro_batch=0, chunk=0, peer=1)")
    assert circle[start : start + 3] == [
        "rank 0: the end of RecvGradient(micro_batch=0, chunk=0, peer=1)",
        "rank 1: posting SendGradient(micro_batch=0, chunk=0, peer=0)",
        "rank 1: the end of RecvActivation(micro_batch=0, chunk=0, peer=0)",
    ]


def test_the_same_in_a_group_does_not_deadlock():
    first = (Forward(0, 0), Group((RecvGradient(0, 0, 1), SendActivation(0, 0, 1))), Backward(0, 0))
    assert check(two_ranks(first, SECOND)).buffers == (1, 1)


def test_a_ring_of_receives_deadlocks_unless_grouped():
    """Both ranks exchange an activation at the same time; whoever only receives first waits forever."""

    def programs(apart):
        exchange = [
            (RecvActivation(1, 1, 1), SendActivation(0, 1, 1)),
            (RecvActivation(0, 1, 0), SendActivation(1, 0, 0)),
        ]
        schedule = build("interleaved", 2, 2, 2)
        changed = []
        for rank, pair in enumerate(exchange):
            actions = [a for _, a in pipeline.actions.flatten(schedule.programs[rank]) if a not in pair]
            last = max(i for i, a in enumerate(actions) if a == Forward(pair[1].micro_batch, pair[1].chunk))
            changed.append((*actions[: last + 1], *(pair if apart else (Group(pair),)), *actions[last + 1 :]))
        return replace(schedule, programs=tuple(changed))

    assert "deadlocks" in refusal(programs(apart=True))
    assert check(programs(apart=False))


def test_a_value_may_be_used_before_it_is_sent():
    """The input gradient lies ready on the rank that computed it, sent or not."""
    first = (Forward(0, 0), SendActivation(0, 0, 1), RecvGradient(0, 0, 1), Backward(0, 0))
    second = (*SECOND[:2], BackwardInput(0, 0), BackwardWeight(0, 0), SendGradient(0, 0, 0))
    assert check(two_ranks(first, second)).messages == 2


def chain(schedule, shape=(4, 8), dtype="float32"):
    spec = Spec(shape, dtype)
    last = schedule.depth - 1
    return [StageSpec(spec if k else None, spec if k < last else None) for k in range(schedule.depth)]


@given(size=st.sampled_from(SIZES), data=st.data())
def test_stages_that_disagree_are_named(size, data):
    schedule = build(*size)
    specs = chain(schedule)
    check(schedule, specs)
    stage = data.draw(st.integers(0, schedule.depth - 2))
    other = data.draw(st.sampled_from([Spec((8, 4), "float32"), Spec((4, 8), "bfloat16"), Spec((4, 8, 1), "float32")]))
    specs[stage] = specs[stage]._replace(output=other)
    (source, _), (target, chunk) = schedule.owner(stage), schedule.owner(stage + 1)
    text = refusal(schedule, specs)
    assert text.startswith(f"rank {source}: SendActivation(micro_batch=0, chunk={stage // schedule.stages}")
    assert f"gives {other}, the output of stage {stage}" in text
    assert f"rank {target}: RecvActivation(micro_batch=0, chunk={chunk}" in text
    assert f"expects 4 x 8 float32, the input of stage {stage + 1}" in text


def test_a_stage_without_a_spec_is_named():
    schedule = build("1f1b", 3, 2)
    specs = chain(schedule)
    assert "stage 1 declares no output" in refusal(schedule, [specs[0], specs[1]._replace(output=None), specs[2]])
    assert "stage 2 declares no input" in refusal(schedule, [*specs[:2], StageSpec(None, None)])


def test_a_backward_may_be_split_for_some_micro_batches_only():
    first = (Forward(0, 0), SendActivation(0, 0, 1), RecvGradient(0, 0, 1), Backward(0, 0))
    second = (*SECOND[:2], BackwardInput(0, 0), SendGradient(0, 0, 0), BackwardWeight(0, 0))
    assert check(two_ranks(first, second)).activations == (1, 1)
    assert "BackwardWeight(micro_batch=0, chunk=0) is missing" in refusal(two_ranks(first, second[:-1]))
    assert "does not belong" in refusal(two_ranks(first, (*second, Backward(0, 0))))


def test_sizes_refused():
    schedule = build("1f1b", 2, 2)
    for wrong, complaint in (
        (replace(schedule, programs=schedule.programs[:1]), "1 programs for 2 ranks"),
        (replace(schedule, micro_batches=0), "at least one stage"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            check(wrong)
    with pytest.raises(ArgumentError, match="3 specs for 2 stages"):
        check(schedule, [StageSpec(None, None)] * 3)


@pytest.mark.parametrize(
    "wrong", ["float32", (4, 8), ((4, 8), "float33"), ((4, -8), "float32"), (4, "float32"), (("a",), "float32")]
)
def test_malformed_specs_are_refused(wrong):
    with pytest.raises(ArgumentError):
        Spec.parse(wrong)
