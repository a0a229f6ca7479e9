"""Operations on a device's streams that have not ended: tracked, ended at their deadline, reported to their Works.

Not here: enqueueing operations (`engine.launch`).
Begin with `tracker`.
"""
