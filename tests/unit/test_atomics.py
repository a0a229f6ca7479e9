"""Copying raw memory in compiled code."""

from __future__ import annotations

import numpy as np
import pytest

from xvcomm.atomics import hand_over
from xvcomm.jit import compiling, kernel


def _copy(dst: int, src: int, count: int) -> None:
    hand_over(dst, src, count)


with compiling():
    copy = kernel("void(int64, int64, int64)")(_copy)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (33, 62)])
def test_every_byte_is_copied_and_none_beside_them(offsets: tuple[int, int]) -> None:
    source = np.random.default_rng(0).integers(0, 255, 4200, np.uint8)
    into, out = offsets
    for count in [*range(200), 2047, 2048, 4096, 4097]:
        target = np.full(4200, 255, np.uint8)
        copy(target.ctypes.data + into, source.ctypes.data + out, count)
        assert (target[into : into + count] == source[out : out + count]).all()
        assert (target[:into] == 255).all() and (target[into + count :] == 255).all()
