"""Operating system: threads, forks, SIGINT, file limits, TCP, warnings, private folders.

Not here: shared memory (`memory.segment`), other processes of the job (`engine.session`).
Start reading at `limits`.
"""
