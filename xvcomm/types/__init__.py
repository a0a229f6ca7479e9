"""Words that all packages share: element types, deadlines, numbers of operations, ranks and islands.

Not here: arrays (`memory`), errors (`xvcomm.errors`), settings (`xvcomm.config`).
Any package may import it; it imports `errors` and `system` only.
Begin with `dtype`.
"""
