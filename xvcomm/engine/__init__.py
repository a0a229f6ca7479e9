"""How a request becomes launches on a device, and what becomes of them.

Not here: checks of arguments (`comm`), schedules (`schedule`), copying (`backends`).
Begin with `context`, then `collectives` and `messages`.
"""
