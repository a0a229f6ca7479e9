"""One process in one job: its device, plug-ins and rings, and the detection of failures of other ranks.

Not here: the state of one communicator (`engine.context`).
Start reading at `session`.
"""
