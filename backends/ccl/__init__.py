"""Native collectives of GPUs: one implementation for NCCL and RCCL.

Not here: the vendors' names of their functions (`cuda`, `rocm`), streams and kernels (`gpu`).
Only `cuda` and `rocm` import it.
Start reading at `collective`.
"""
