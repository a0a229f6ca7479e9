"""The user's interface: the communicator with its collectives, messages, objects and subgroups, and `init`.

Not here: how an operation runs (`engine`).
Adapters, the command line and the conformance suites import it.
Start reading at `communicator`.
"""
