"""Sparse matrices of cupyx and scipy: the arrays that they are made of."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from xvcomm.errors import ArrayError

_FORMATS = {"csr": ("data", "indptr", "indices"), "csc": ("data", "indptr", "indices"), "coo": ("data", "row", "col")}


class Told(NamedTuple):
    """What a rank tells of a sparse matrix before it sends its parts."""

    format: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]

    def room(self, model: Any) -> Parts:
        """Parts to receive into, for a matrix like `model`.

        Raises:
            ArrayError: that one has another format.
        """
        if model.format != self.format:
            raise ArrayError(
                f"a sparse matrix in {self.format} format comes, and the one to receive it is {model.format}"
            )
        empty = _library(model).empty
        return Parts(self, tuple(empty(n, dtype) for n, dtype in zip(self.sizes, self.dtypes, strict=True)))


class Parts(NamedTuple):
    """The arrays that a sparse matrix is made of, and what is told of them."""

    told: Told
    arrays: tuple[Any, ...]

    @classmethod
    def of(cls, matrix: Any) -> Parts:
        """The parts of a matrix."""
        names = _FORMATS.get(matrix.format)
        if names is None:
            raise ArrayError(
                f"a sparse matrix in {matrix.format} format; those that can be sent are {', '.join(_FORMATS)}"
            )
        if matrix.format == "coo":
            matrix.sum_duplicates()  # as cupyx does
        arrays = tuple(getattr(matrix, name) for name in names)
        told = Told(
            matrix.format, tuple(matrix.shape), tuple(a.size for a in arrays), tuple(a.dtype.str for a in arrays)
        )
        return cls(told, arrays)

    def assign(self, matrix: Any) -> None:
        """Let a matrix of the same format consist of them."""
        for name, part in zip(_FORMATS[self.told.format], self.arrays, strict=True):
            setattr(matrix, name, part)
        matrix._shape = self.told.shape

    def matrix(self, model: Any) -> Any:
        """A new matrix of the same type as `model`, or an array if that is one."""
        data, first, second = self.arrays
        parts = (data, (first, second)) if self.told.format == "coo" else (data, second, first)
        return type(model)(parts, shape=self.told.shape)


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse matrix, or a list of some, of cupyx or scipy."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    return hasattr(first, "format") and hasattr(first, "asformat")


def _library(x: Any) -> Any:
    """CuPy or numpy: what makes arrays for an array or a sparse matrix."""
    return import_module("cupy" if type(x).__module__.partition(".")[0] in ("cupy", "cupyx") else "numpy")
