"""mpi4py's interface over a Communicator: upper-case methods for buffers, lower-case ones for objects.

    from xvcomm.adapters.mpi import MPI      # instead of: from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Allreduce(MPI.IN_PLACE, x)

`Comm(communicator)` is the same view of an existing Communicator.
"""

from xvcomm.adapters.mpi import mpi as MPI
from xvcomm.adapters.mpi.comm import Comm

__all__ = ["MPI", "Comm"]
