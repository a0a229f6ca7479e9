"""GPUs as devices: one implementation for CUDA and HIP, over a table of their common functions.

Not here: the vendors' names of these functions (`cuda`, `rocm`), NCCL and RCCL (`ccl`).
Start reading at `device`.
"""
