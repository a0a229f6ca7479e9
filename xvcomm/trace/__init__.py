"""What happened, and whether the ranks agree: operations, the flight recorder and what is made of it, the contract check.

Not here: what becomes of a disagreement (`engine.session.diagnosis`).
Begin with `operation`; `format` reads a flight recorder without numba.
"""
