"""What the operating system gives this process, and what it refuses: threads, forks, interrupts, limits, folders.

Not here: shared memory (`memory.segment`), other processes of the job (`engine.session`).
Any package may import it; it imports `errors` only.
Begin with `limits`.
"""
