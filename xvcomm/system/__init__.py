"""Operating system: threads, forks, SIGINT, file limits, warnings, private folders.

Not here: shared memory (`memory.segment`), other processes of the job (`engine.session`).
Any package may import it; it imports `errors` only.
Start reading at `limits`.
"""
