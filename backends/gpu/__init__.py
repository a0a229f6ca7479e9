"""GPUs as devices: one implementation for CUDA and HIP, over a table of the calls that they have in common.

Not here: the vendors' names for these calls (`cuda`, `rocm`), NCCL and RCCL (`ccl`).
Only `ccl`, `cuda` and `rocm` import it.
Begin with `device`.
"""
