"""RDMA between hosts: devices, queue pairs, and the compiled code that posts requests and polls completions.

Not here: rings and rails, which `wire` has. A transport over these parts does not exist yet: no data goes over RDMA.
`report` is what `xvcomm doctor` shows.
Begin with `devices`, then `queues`, and `verbs` for what runs without the interpreter; `events` tells what happens to ports.
"""
