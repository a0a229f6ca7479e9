"""Native collectives of GPUs: one implementation for NCCL and RCCL.

Not here: the vendors' names for their calls (`cuda`, `rocm`), streams and kernels (`gpu`).
Only `cuda` and `rocm` import it.
Begin with `collective`.
"""
