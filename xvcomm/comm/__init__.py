"""What a user holds: the communicator with its collectives, messages, objects and subgroups, and `init`.

Not here: how an operation runs (`engine`).
Adapters, the command and the conformance suites import it.
Begin with `communicator`.
"""
