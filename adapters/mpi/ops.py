"""Reductions: MPI's names, what they are in xvcomm, and what to do with those it does not have."""

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
        core: name of xvcomm's own for it, or None.
        logical: name of xvcomm's own that does it to truth values, or None.
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
            raise TypeError("a reduction made by Op.Create cannot be pickled")
        return _named, (self.name,)

    def __call__(self, x: Any, y: Any) -> Any:
        """Combine two objects."""
        return self._function(x, y)

    @classmethod
    def Create(cls, function: UserFunction, commute: bool = False) -> Op:
        """Make one of a function `f(a, b, datatype)`, which gets two memories and puts a combined with b into b."""

        def apply(x: Any, y: Any) -> Any:
            raise ArgumentError("a reduction of memories is for the upper-case methods; pass a function of two objects")

        return cls("user-defined", apply, user=function, commutes=commute)

    def Is_commutative(self) -> bool:
        """Whether the order of ranks does not matter."""
        return self._commutes

    def Free(self) -> None:
        """Nothing: it goes when nobody has it any more."""

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this rank; the result goes to the second.

        Raises:
            ArgumentError: they differ in length or type.
        """
        a, b = block(inbuf), block(inoutbuf)
        if (a.each, a.type.numpy) != (b.each, b.type.numpy):
            raise ArgumentError(f"Reduce_local: {a.each} x {a.type} and {b.each} x {b.type}; both must be the same")
        out = b.flat()
        out[...] = self.fold([a.flat(), out.copy()])

    def carries(self, dtype: np.dtype[Any]) -> bool:
        """Whether xvcomm itself reduces arrays of a dtype by it."""
        if self.core is None:
            return False
        try:
            reduction_on(self.core, from_numpy(dtype))
        except DTypeError:
            return False
        return True

    def fold(self, rows: Sequence[Array] | Array) -> Array:
        """Combine vectors in their order, on this rank; low precision in float32, rounded once.

        Raises:
            DTypeError: it is not defined on their dtype.
        """
        if self._user is not None:
            kind, total = of(rows[-1].dtype), rows[-1].copy()
            for row in rows[-2::-1]:
                self._user(memoryview(_bytes(row)), memoryview(_bytes(total)), kind)
            return total
        if self._ufunc is None:
            raise DTypeError(f"{self.name} is for Python objects, by the lower-case methods")
        try:
            # A single row is nothing to combine, and must be refused all the same.
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


def _named(name: str) -> Op:
    return NAMED[name]
