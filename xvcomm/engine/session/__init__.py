"""One process in one job: its device, its plug-ins, its rings, and the watch over the other ranks.

Not here: what belongs to one communicator (`engine.context`).
`engine` and what lies above it import it.
Begin with `session`.
"""
