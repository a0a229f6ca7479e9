"""Deprecated name of `xvcomm.adapters.mpi`, for one release."""

import warnings

from xvcomm.adapters.mpi import MPI, Comm

__all__ = ["MPI", "Comm"]

warnings.warn("xvcomm.adapters.numpy is now xvcomm.adapters.mpi: change the import", DeprecationWarning, stacklevel=2)
