"""`xvcomm bench`: times operations over a range of sizes, next to other libraries, and verifies the results.

Not here: the benchmarks for the project's own figures (`benchmarks/`), which use `measure`.
Only `cli` and `benchmarks/` import it.
Start reading at `command`.
"""
