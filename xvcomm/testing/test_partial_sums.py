"""Partial sums in float32, on every registered backend whose device keeps them."""

from __future__ import annotations

import numpy as np
import pytest

from xvcomm.abc.partial_sums import SupportsConversion
from xvcomm.testing.benches import Bench, address, get, put, streams
from xvcomm.testing.cases import assert_same_bits, sample
from xvcomm.types.dtype import DTYPES, DType


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.low_precision], ids=str)
def test_conversion_rounds_once(bench: Bench, dtype: DType) -> None:
    """To float32 nothing is rounded, scaled or not; back, a quotient is rounded once."""
    device, (stream,) = bench.left, streams(bench.left)
    if not isinstance(device, SupportsConversion):
        pytest.skip("this device keeps no partial sums in float32")
    x = sample(dtype, 5003, seed=1, unit=4)
    for factor, divisor, want in (
        (1.0, 0, x.astype("f4")),
        (0.5, 0, x.astype("f4") / 2),
        (0.0, 3, x.astype("f4") / np.float32(3)),
    ):
        narrow, wide, back = put(device, x), put(device, np.zeros(x.shape, "f4")), put(device, np.zeros_like(x))
        device.convert(address(wide), address(narrow), x.size, dtype, factor, divisor, stream, widens=True)
        stream.synchronize()
        if not divisor:
            assert_same_bits(get(device, wide), want, f"{dtype} in float32")
        unscaled = put(device, x.astype("f4"))
        device.convert(address(back), address(unscaled), x.size, dtype, factor, divisor, stream, widens=False)
        stream.synchronize()
        assert_same_bits(get(device, back), want.astype(x.dtype), f"{dtype} from float32")
