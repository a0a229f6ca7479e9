"""Contracts of a device, and of its native library, that keep partial sums of low precision in float32: host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from xvcomm.abc.device import Stream
from xvcomm.types.dtype import DType, Reduction


class SupportsConversion(ABC):
    """What a `Device` also implements if it converts between low precision and float32."""

    @abstractmethod
    def convert(
        self, dst: int, src: int, count: int, dtype: DType, factor: float, divisor: int, stream: Stream, *, widens: bool
    ) -> None:
        """`Device.scale` from `count` elements of low-precision `dtype` to float32 if `widens`, else from float32 to `dtype`."""


class SupportsPartialSums(ABC):
    """What a `Collective` also implements if it can leave its result in float32."""

    @abstractmethod
    def partial_sums(
        self, src: int, dst: int, counts: Sequence[int], dtype: DType, op: Reduction, stream: Stream
    ) -> None:
        """`Collective.reduce_scatter` of a low-precision `dtype`, with `dst` in float32.

        Raises:
            CollectiveStopped, CollectiveStalled: see `Collective`.
        """
