"""Where bytes lie: arrays of any framework, shared memory segments, and the ring between two ranks.

Not here: copying (`backends`), and which ranks have a ring (`engine.session.rings`).
Begin with `ring`.
"""
