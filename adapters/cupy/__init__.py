"""CuPy: what `cupyx.distributed` offers, over a Communicator, so that a program ports by its import.

    from xvcomm.adapters.cupy import init_process_group      # instead of: from cupyx.distributed import ...

    comm = init_process_group(n_devices, rank)
    comm.all_reduce(in_array, out_array)

Ranks on other vendors' GPUs and on host memory may take part: there the arrays are those of their CuPy, or numpy's and
scipy's. A Communicator takes CuPy's arrays as they are, too; nothing here is needed for that.

CuPy is imported when a rank that has a GPU joins.
"""

from xvcomm.adapters.cupy.backend import NCCLBackend, init_process_group

__all__ = ["NCCLBackend", "init_process_group"]
