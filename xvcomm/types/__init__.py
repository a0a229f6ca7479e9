"""Types that all packages use: element types, deadlines, operation codes, ranks and islands.

Not here: arrays (`memory`), errors (`xvcomm.errors`), settings (`xvcomm.config`).
Any package may import it; it imports `errors` and `system` only.
Start reading at `dtype`.
"""
