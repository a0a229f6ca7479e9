"""A rank that prints the CPU seconds that it took after its imports, to the end of its first `all_reduce`."""

import time

import numpy as np

import xvcomm
import xvcomm.comm.communicator

begun = time.process_time()
with xvcomm.init() as comm:
    assert comm.all_reduce(np.ones(4))[0] == comm.size
    seconds = time.process_time() - begun
    comm.barrier()
    print(seconds)
