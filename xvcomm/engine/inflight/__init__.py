"""What the host has left behind on a device's streams: tracked, ended at its deadline, and told to who waits for it.

Not here: putting it there (`engine.launch`).
`engine` and what lies above it import it.
Begin with `tracker`.
"""
