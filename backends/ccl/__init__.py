"""Native collectives of GPUs: one implementation for NCCL and RCCL.

Not here: the vendors' names of their functions (`cuda`, `rocm`), streams and kernels (`gpu`).
Start reading at `collective`.
"""
