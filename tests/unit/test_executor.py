"""Scratch memory of schedules on one stream: how it is shared, and how long it is kept."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest

from xvcomm.abc.device import Allocation
from xvcomm.engine.executor import Executor

CAPTURING = 9
"""Handle of a stream that is being captured."""


@pytest.fixture
def context() -> Any:
    """An executor whose device returns a new address for each allocation."""
    addresses = itertools.count(4096, 4096)
    context: Any = Mock()
    context.device.streams = lambda count: [Mock() for _ in range(count)]
    context.device.empty = Mock(side_effect=lambda nbytes: Allocation(next(addresses), nbytes, None))
    context.device.adopt = lambda handle: Mock(capturing=lambda: handle == CAPTURING)
    return context


@pytest.fixture
def executor(context: Any) -> Executor:
    return Executor(context)


def test_collectives_of_one_stream_share_scratch_memory(executor: Executor) -> None:
    assert executor.serial_scratch(0, (7, 0), 0) == 0
    first = executor.serial_scratch(100, (7, 0), 0)
    assert executor.serial_scratch(100, (7, 0), 0) == executor.serial_scratch(1, (7, 0), 0) == first
    others = {executor.serial_scratch(100, queue, 0) for queue in ((8, 0), (2, 11), (2, 12))}
    assert len(others | {first}) == 4, "other streams, and those of other threads, have their own"


def test_scratch_memory_lies_in_words_as_the_output_does(executor: Executor) -> None:
    first = executor.serial_scratch(100, (7, 0), 0)
    assert executor.serial_scratch(100, (7, 0), 4096 + 12) == first + 12


def test_scratch_memory_that_was_given_out_stays(context: Any, executor: Executor) -> None:
    given = [executor.serial_scratch(nbytes, (7, 0), 0) for nbytes in (100, 101, 216, 217)]
    assert given[0] != given[1] == given[2] != given[3]
    assert [call.args[0] for call in context.device.empty.call_args_list] == [100 + 16, 2 * 116, 4 * 116]
    assert executor.serial_scratch(400, (7, 0), 0) == given[3]


def test_a_graph_takes_no_new_memory_where_some_suffices(executor: Executor) -> None:
    small, large = executor.serial_scratch(100, (7, 0), 0), executor.serial_scratch(200, (8, 0), 0)
    assert executor.serial_scratch(100, (CAPTURING, 0), 0) == small
    assert executor.serial_scratch(200, (CAPTURING, 0), 0) == large
    assert executor.serial_scratch(300, (CAPTURING, 0), 0) not in (small, large), "and the device says that it cannot"


def test_memory_that_a_graph_used_is_not_the_streams_own(context: Any, executor: Executor) -> None:
    """Calls on the stream outside of graphs are not ordered with those of the other stream."""
    large = executor.serial_scratch(200, (8, 0), 0)
    assert executor.serial_scratch(200, (CAPTURING, 0), 0) == large
    context.device.adopt = lambda handle: Mock(capturing=lambda: False)
    assert executor.serial_scratch(200, (CAPTURING, 0), 0) != large
