"""The dependencies of a step against a history kept element by element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xvcomm.schedule.hazards import Hazards

accesses = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 12), st.integers(0, 2)), max_size=40)


@given(accesses)
def test_waits_are_those_of_the_elements_touched(history: list[tuple[bool, int, int, int]]) -> None:
    hazards = Hazards()
    writers = [-1] * 50
    readers: list[dict[int, int]] = [{} for _ in range(50)]
    for step, (writes, start, count, lane) in enumerate(history):
        touched = range(start, start + count)
        wanted = {writers[x] for x in touched}
        if writes:
            wanted |= {reader for x in touched for reader in readers[x].values()}
            found = hazards.write(start, start + count, step)
        else:
            found = hazards.read(start, start + count, step, lane)
        assert found - {-1} == wanted - {-1}
        for x in touched:
            if writes:
                writers[x], readers[x] = step, {}
            else:
                readers[x][lane] = step
