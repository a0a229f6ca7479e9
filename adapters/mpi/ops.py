"""Reductions: MPI's names, the corresponding ones of xvcomm, and implementations of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xvcomm.adapters.mpi.buffers import block
from xvcomm.adapters.mpi.datatypes import Datatype, of
from xvcomm.errors import ArgumentError, DTypeError
from xvcomm.types.dtype import BY_NAME, from_numpy, reduction_on

Array = NDArray[Any]
UserFunction = Callable[[memoryview, memoryview, Datatype], None]


class Op:
    """A reduction; also a function of two Python objects.

    Attributes:
        core: name of the same reduction in xvcomm, or None.
        logical: name of xvcomm's reduction that gives the result on truth values, or None.
    """

    def __init__(
        self, name: str, function: Callable[[Any, Any], Any], *, core: str | None = None, logical: str | None = None,
        ufunc: Callable[..., Any] | None = None, user: UserFunction | None = None, commutes: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.core, self.logical = name, core, logical
        self._function, self._ufunc, self._user, self._commutes = function, ufunc, user, commutes

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.name not in NAMED:
            raise TypeError("a reduction created by Op.Create cannot be pickled")
        return _named, (self.name,)

    def __call__(self, x: Any, y: Any) -> Any:
        """Combine two objects."""
        return self._function(x, y)

    @classmethod
    def Create(cls, function: UserFunction, commute: bool = False) -> Op:
        """Create a reduction from a function `f(a, b, datatype)` of two buffers, which stores the result in b."""

        def apply(x: Any, y: Any) -> Any:
            raise ArgumentError("a reduction of buffers is for the upper-case methods; pass a function of two objects")

        return cls("user-defined", apply, user=function, commutes=commute)

    def Is_commutative(self) -> bool:
        """Whether the order of ranks is irrelevant."""
        return self._commutes

    def Free(self) -> None:
        """No-op: reductions are garbage-collected."""

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this rank into the second one.

        Raises:
            ArgumentError: they differ in length or type.
        """
        a, b = block(inbuf), block(inoutbuf)
        if (a.each, a.type.numpy) != (b.each, b.type.numpy):
            raise ArgumentError(f"Reduce_local: {a.each} x {a.type} and {b.each} x {b.type}; both must be the same")
        out = b.flat()
        out[...] = self.fold([a.flat(), out.copy()])

    def carries(self, dtype: np.dtype[Any]) -> bool:
        """Whether xvcomm supports this reduction of a dtype."""
        if self.core is None:
            return False
        try:
            reduction_on(self.core, from_numpy(dtype))
        except DTypeError:
            return False
        return True

    def fold(self, rows: Sequence[Array] | Array) -> Array:
        """Combine vectors in their order, on this rank; low precision computes in float32 and rounds once.

        Raises:
            DTypeError: it is not defined for their dtype.
        """
        if self._user is not None:
            kind, total = of(rows[-1].dtype), rows[-1].copy()
            for row in rows[-2::-1]:
                self._user(memoryview(_bytes(row)), memoryview(_bytes(total)), kind)
            return total
        if self._ufunc is None:
            raise DTypeError(f"{self.name} is for Python objects; use the lower-case methods")
        try:
            # Checks the dtype even if there is a single row, which needs no combination.
            self._ufunc(rows[0][:0], rows[0][:0])
            given = rows[0].dtype
            low = BY_NAME.get(given.name)
            if low is not None and low.low_precision:
                rows = [row.astype(np.float32) for row in rows]
            return np.asarray(reduce(self._ufunc, rows)).astype(given, copy=False)
        except TypeError as error:
            raise DTypeError(f"{self.name} is not defined on {rows[0].dtype}: {error}") from None


def _maxloc(x: Any, y: Any) -> Any:
    return (x[0], min(x[1], y[1])) if x[0] == y[0] else max(x, y, key=_first)


def _minloc(x: Any, y: Any) -> Any:
    return (x[0], min(x[1], y[1])) if x[0] == y[0] else min(x, y, key=_first)


def _bytes(x: Array) -> Any:
    return np.ascontiguousarray(x).view(np.uint8)


def _first(pair: Any) -> Any:
    return pair[0]


NAMED = {
    op.name: op
    for op in (
        Op("MAX", lambda x, y: y if y > x else x, core="max", ufunc=np.maximum),
        Op("MIN", lambda x, y: y if y < x else x, core="min", ufunc=np.minimum),
        Op("SUM", lambda x, y: x + y, core="sum", ufunc=np.add),
        Op("PROD", lambda x, y: x * y, core="prod", ufunc=np.multiply),
        Op("LAND", lambda x, y: bool(x) and bool(y), logical="min", ufunc=np.logical_and),
        Op("LOR", lambda x, y: bool(x) or bool(y), logical="max", ufunc=np.logical_or),
        Op("LXOR", lambda x, y: bool(x) != bool(y), logical="bxor", ufunc=np.logical_xor),
        Op("BAND", lambda x, y: x & y, core="band", ufunc=np.bitwise_and),
        Op("BOR", lambda x, y: x | y, core="bor", ufunc=np.bitwise_or),
        Op("BXOR", lambda x, y: x ^ y, core="bxor", ufunc=np.bitwise_xor),
        Op("MAXLOC", _maxloc),
        Op("MINLOC", _minloc),
        Op("REPLACE", lambda x, y: y, ufunc=lambda x, y: y),
        Op("NO_OP", lambda x, y: x, ufunc=lambda x, y: x),
    )
}
SUM = NAMED["SUM"]


def _named(name: str) -> Op:
    return NAMED[name]
