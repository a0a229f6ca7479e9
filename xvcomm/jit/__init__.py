"""Code that runs without the interpreter: compiled once by numba, kept on disk, atomics, calls of C functions.

Not here: the kernels themselves, which lie where they are used, and those of GPUs (`backends`).
Every package above `types` may import it.
Begin with `compile`.
"""
