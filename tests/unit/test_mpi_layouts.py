"""Derived datatypes: their layout against explicit lists of offsets, and their memory use."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xvcomm.adapters.mpi import MPI
from xvcomm.adapters.mpi.layouts import BASIC, Layout, indexed, subarray, vector

few = st.integers(0, 4)
Written = tuple[list[int], Layout]
"""Places, one a basic element, and the layout that means the same."""


def repeated(places: list[int], starts: list[int], extent: int) -> list[int]:
    return [start * extent + place for start in starts for place in places]


@st.composite
def layouts(draw: st.DrawFn, depth: int = 2) -> Written:
    places, layout = draw(layouts(depth - 1)) if depth else ([0], BASIC)
    match draw(st.sampled_from(["vector", "indexed", "subarray"])):
        case "vector":
            count, length, stride = draw(few), draw(few), draw(few)
            starts = [block * stride + i for block in range(count) for i in range(length)]
            return repeated(places, starts, layout.extent), vector(layout, count, length, stride)
        case "indexed":
            blocks = draw(st.lists(st.tuples(st.sampled_from([0, 1, 2, 40]), st.integers(0, 50)), max_size=4))
            starts = [start + i for count, start in blocks for i in range(count)]
            made = indexed(layout, [count for count, _ in blocks], [start for _, start in blocks])
            return repeated(places, starts, layout.extent), made
        case _:
            shape, first = (draw(st.integers(1, 4)), draw(st.integers(1, 4))), (draw(few), draw(few))
            sizes = [n + begin for n, begin in zip(shape, first, strict=True)]
            order = draw(st.sampled_from("CF"))
            numbers = np.arange(sizes[0] * sizes[1]).reshape(sizes, order=order)[first[0] :, first[1] :]
            made = subarray(layout, sizes, shape, first, columns_first=order == "F")
            return repeated(places, numbers.flatten(order).tolist(), layout.extent), made


@given(layouts(), few, few, st.data())
def test_same_as_places_that_are_written_out(written: Written, first: int, count: int, data: st.DataObject) -> None:
    one, layout = written
    layout = pickle.loads(pickle.dumps(layout)).repeated(first, count)
    places = repeated(one, list(range(first, first + count)), written[1].extent)
    assert layout.size == len(places) and layout.last == max(places, default=-1)
    memory = np.arange(layout.last + 2)
    assert layout.pack(memory).tolist() == memory[places].tolist() if places else layout.pack(memory).size == 0
    if len(set(places)) == len(places):
        expected, x = memory.copy(), np.arange(data.draw(st.integers(0, len(places)))) + 1000
        layout.unpack(memory, x)
        expected[places[: x.size]] = x
        assert memory.tolist() == expected.tolist()


def test_memory() -> None:
    """A datatype takes as much as what describes it, and packing it hardly more than the packed elements."""
    tracemalloc.start()
    try:
        whole = MPI.BYTE.Create_contiguous(2**31 - 1)
        column = MPI.BYTE.Create_vector(10**9, 1, 7)
        blocks = MPI.BYTE.Create_indexed([2**31 - 2, 1], [0, 2**31])
        part = MPI.BYTE.Create_subarray([10**5] * 3, [10**4, 10**5, 1], [7, 0, 5])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        assert [t.size for t in (whole, column, blocks, part)] == [2**31 - 1, 10**9, 2**31 - 1, 10**9]
        buffer = np.ones(1 << 24, np.uint8)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for datatype in (MPI.BYTE.Create_contiguous(1 << 23), MPI.BYTE.Create_vector(1 << 23, 1, 2)):
            datatype.layout.unpack(buffer, datatype.layout.pack(buffer)[:-3])
        pairs = MPI.BYTE.Create_indexed_block(1, [0, 2]).layout.repeated(0, 1 << 22)
        pairs.unpack(buffer, pairs.pack(buffer))
        assert tracemalloc.get_traced_memory()[1] - before < (1 << 23) + (4 << 20)
    finally:
        tracemalloc.stop()
