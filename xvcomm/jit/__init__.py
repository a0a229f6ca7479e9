"""Compiled code that runs without the interpreter: numba's compilation and its disk cache, atomics, calls of C functions.

Not here: the kernels themselves, which are in the modules that use them, and GPU kernels (`backends`).
Start reading at `compile`.
"""
