"""The user's interface: the communicator with its collectives, messages, objects and subgroups, and `init`.

Not here: how an operation runs (`engine`).
Start reading at `communicator`.
"""
