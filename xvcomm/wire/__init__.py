"""The wire: what keeps the two halves of a ring equal whose ends are on two hosts.

Not here: which interfaces and addresses are used (`backends.tcp`), RDMA devices (`backends.rdma`; `abc.cards` tells what
the wire needs of them), and what fills and drains rings (movers).
`backends` and the engine import it.
Begin with `frames`, then `carrier`.
"""
