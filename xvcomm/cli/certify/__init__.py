"""`xvcomm certify`: one command that proves what a job of these ranks can do, and writes a report.

Each section is a module with one `Section`: what it needs, and how it runs. `runner` runs them on the ranks of a job,
`control` keeps the ranks together beside the operations under test, `report` and `page` write what was found. Begin to read in
`contract`.
"""
