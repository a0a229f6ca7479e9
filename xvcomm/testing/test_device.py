"""The contract of `Device` on every registered backend: capabilities, memory, and operations on arrays of one device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from xvcomm.engine.session import plugins
from xvcomm.testing.benches import Bench, address, get, put, streams
from xvcomm.testing.cases import assert_equal, assert_same_bits, expected, reductions, sample
from xvcomm.types.dtype import DTYPES, DType, ReduceOp, Reduction


def test_capabilities_name_the_device(bench: Bench, request: pytest.FixtureRequest) -> None:
    """Kind as registered; ranks with equal islands can join."""
    able = bench.left.capabilities()
    assert able.kind in {found.name for found in plugins.backends()}
    assert able.island and able.architecture
    assert able == bench.right.capabilities()


@pytest.mark.parametrize("nbytes", [0, 1, 64, 1_000_001])
def test_memory_is_aligned(bench: Bench, nbytes: int) -> None:
    """Allocations begin at 64-byte multiples and do not overlap."""
    made = sorted((bench.left.empty(nbytes) for _ in range(4)), key=lambda m: m.address)
    for one, following in pairwise(made):
        assert one.address % 64 == 0 and one.nbytes >= nbytes
        assert one.address + nbytes <= following.address


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_many(bench: Bench, dtype: DType) -> None:
    """One to five operands, into memory of its own and onto one of them; low precision rounds once, also an average."""
    device = bench.left
    for op in (o for o in reductions(dtype) if o is not ReduceOp.PREMUL_SUM):
        averages = (2,) if dtype.kind == "c" else (2, 3, 5)  # numpy divides complex numbers in another way
        for ways in averages if op is ReduceOp.AVG else (1, 2, 3, 5):
            base, divisor = Reduction(op).base, ways if op is ReduceOp.AVG else 0
            values = [sample(dtype, 9001, seed=i, most=1) for i in range(ways)]
            want = expected(op, dtype, values, [])
            for place in (None, 0, ways - 1):
                terms = [put(device, v) for v in values]
                target = put(device, np.zeros_like(want)) if place is None else terms[place]
                stream = streams(device)[0]
                device.reduce(address(target), [address(t) for t in terms], 9001, dtype, base, stream, divisor=divisor)
                stream.synchronize()
                assert_equal(get(device, target), want, f"{op} of {ways} x {dtype} onto {place}")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
def test_scale_and_copy(bench: Bench, dtype: DType) -> None:
    """Multiply, divide, and move, in place too."""
    device, stream = bench.left, streams(bench.left)[0]
    x = sample(dtype, 5003, seed=1, unit=4)
    for factor, divisor, want in ((2.0, 0, x + x), (0.0, 4, sample(dtype, 5003, seed=1))):
        if dtype.kind == "c" and divisor:
            want = x / dtype.numpy.type(4)
        source, target = put(device, x), put(device, np.zeros_like(x))
        device.scale(address(target), address(source), x.size, dtype, factor, divisor, stream)
        device.scale(address(source), address(source), x.size, dtype, factor, divisor, stream)
        device.copy(address(target) + x.nbytes // 2, address(source), 0, stream)
        stream.synchronize()
        assert_equal(get(device, target), want, f"scaled {dtype}")
        assert_equal(get(device, source), want, f"{dtype} scaled in place")
    source, target = put(device, x), put(device, np.zeros_like(x))
    device.copy(address(target), address(source), x.nbytes, stream)
    stream.synchronize()
    assert_same_bits(get(device, target), x, f"copied {dtype}")
