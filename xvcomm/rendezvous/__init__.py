"""How the ranks of a job find each other: what a launcher says of this process, and the store in which they meet.

Not here: what they agree on there (`engine.session`), and starting ranks (`cli.launcher`).
Every package above `abc` may import it, but not `schedule`.
Begin with `environment`.
"""
