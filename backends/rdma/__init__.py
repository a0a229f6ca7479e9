"""RDMA between hosts: devices and their events, registered memory, queue pairs and completion queues.

Not here: the compiled code that posts requests and polls completions (`wire.verbs`), rings and rails, which `wire` has, and the
transport, which is `tcp`: it takes the devices that `cards` opens. `report` is what `xvcomm doctor` shows.
Begin with `devices` and `gids`, then `queues` and `pairs`; `events` tells what happens to ports. `rails` and `cards` put these
together for the wire.
"""
