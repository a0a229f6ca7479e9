"""Sparse matrices of cupyx and scipy, as the arrays that they consist of."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from xvcomm.errors import ArrayError

_FORMATS = {"csr": ("data", "indptr", "indices"), "csc": ("data", "indptr", "indices"), "coo": ("data", "row", "col")}


class Told(NamedTuple):
    """What a rank sends about a sparse matrix before its parts."""

    format: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]

    def room(self, model: Any) -> Parts:
        """Parts to receive into, for a matrix like `model`.

        Raises:
            ArrayError: `model` has another format.
        """
        if model.format != self.format:
            raise ArrayError(f"the received sparse matrix has the format {self.format}, but the output {model.format}")
        empty = _library(model).empty
        return Parts(self, tuple(empty(n, dtype) for n, dtype in zip(self.sizes, self.dtypes, strict=True)))


class Parts(NamedTuple):
    """The arrays of a sparse matrix, and their description."""

    told: Told
    arrays: tuple[Any, ...]

    @classmethod
    def of(cls, matrix: Any) -> Parts:
        """The parts of a matrix."""
        names = _FORMATS.get(matrix.format)
        if names is None:
            raise ArrayError(f"a sparse matrix in {matrix.format} format; supported are {', '.join(_FORMATS)}")
        if matrix.format == "coo":
            matrix.sum_duplicates()  # as cupyx does
        arrays = tuple(getattr(matrix, name) for name in names)
        told = Told(
            matrix.format, tuple(matrix.shape), tuple(a.size for a in arrays), tuple(a.dtype.str for a in arrays)
        )
        return cls(told, arrays)

    def assign(self, matrix: Any) -> None:
        """Set the parts of a matrix of the same format."""
        for name, part in zip(_FORMATS[self.told.format], self.arrays, strict=True):
            setattr(matrix, name, part)
        matrix._shape = self.told.shape

    def matrix(self, model: Any) -> Any:
        """Create a matrix of the same type as `model`, or an array if that is one."""
        data, first, second = self.arrays
        parts = (data, (first, second)) if self.told.format == "coo" else (data, second, first)
        return type(model)(parts, shape=self.told.shape)


def is_sparse(x: Any) -> bool:
    """Whether it is a sparse matrix of cupyx or scipy, or a list of some."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    return hasattr(first, "format") and hasattr(first, "asformat")


def _library(x: Any) -> Any:
    """CuPy or numpy, whichever an array or a sparse matrix belongs to."""
    return import_module("cupy" if type(x).__module__.partition(".")[0] in ("cupy", "cupyx") else "numpy")
