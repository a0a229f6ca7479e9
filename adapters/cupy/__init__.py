"""CuPy: the interface of `cupyx.distributed` over a Communicator, so that a program is ported by its import.

    from xvcomm.adapters.cupy import init_process_group      # instead of: from cupyx.distributed import ...

    comm = init_process_group(n_devices, rank)
    comm.all_reduce(in_array, out_array)

Ranks on other vendors' GPUs and on host memory may take part, with arrays of their CuPy, or of numpy and scipy. A Communicator
also accepts CuPy's arrays directly, without this adapter.

CuPy is imported when a rank with a GPU joins.
"""

from xvcomm.adapters.cupy.backend import NCCLBackend, init_process_group

__all__ = ["NCCLBackend", "init_process_group"]
