"""Types that all packages use: element types, deadlines, operation codes, ranks and islands.

Not here: arrays (`memory`), errors (`xvcomm.errors`), settings (`xvcomm.config`).
Start reading at `dtype`.
"""
