"""Records shared by Python and compiled code."""

from __future__ import annotations

import ctypes

import numpy as np
from numba import njit

from xvcomm.jit.atomics import fetch_add
from xvcomm.jit.record import address_of, compiled_at, python_type

INNER = np.dtype([("first", "i8"), ("second", "i8")])
OUTER = np.dtype([("count", "i8"), ("inner", INNER), ("late", "f8")])
Outer, outer_at = python_type(OUTER), compiled_at(OUTER)
inner_at = compiled_at(INNER)


@njit
def change(address: int, index: int) -> int:
    record = outer_at(address, index)
    record.late = record.late * 2
    inner = record.inner
    inner.second = record.count
    return fetch_add(address_of(record, "count"), 5)


@njit
def first_of(address: int, index: int) -> int:
    return inner_at(address_of(outer_at(address, index), "inner")).first


def test_both_sides_use_one_declaration() -> None:
    records = (Outer * 3)()
    records[1].count, records[1].late = 7, 1.25
    records[1].inner.first = 9
    assert change(ctypes.addressof(records), 1) == 7
    assert (records[1].count, records[1].inner.second, records[1].late) == (12, 7, 2.5)
    assert first_of(ctypes.addressof(records), 1) == 9
    assert not any(bytes(records[0])) and not any(bytes(records[2]))
