"""A small LLaMA-style decoder that can be cut into pipeline stages, in numpy (manual backward pass), torch and jax."""

import os

# The ranks of a host share its cores. The libraries read this when they load, so it stands before their first import.
_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
_threads = str(max(1, len(os.sched_getaffinity(0)) // _ranks_here))
os.environ.setdefault("OMP_NUM_THREADS", _threads)
os.environ.setdefault("NPROC", _threads)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
