"""Rendezvous: this process's rank from the launcher's environment, and the stores through which ranks exchange addresses.

Not here: what the ranks agree on (`engine.session`), and starting ranks (`cli.launcher`).
Start reading at `environment`.
"""
