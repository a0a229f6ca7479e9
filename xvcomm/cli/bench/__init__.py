"""`xvcomm bench`: times the operations over sizes, beside other libraries, and checks the results.

Not here: the benchmarks of the project's own figures (`benchmarks/`), which measure by `measure`.
Only `cli` and `benchmarks/` import it.
Begin with `command`.
"""
