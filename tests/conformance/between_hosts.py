"""Checks for ranks with GPU memory on several hosts, for the stand-in and for GPUs."""

from xvcomm.testing import asynchronous, channels, collectives, graphs, pointtopoint

GRAPHS = (graphs.check_graphs, graphs.check_graph_of_many)
CHECKS = [
    *((collectives.check_all_reduce, "float32", "sum", count) for count in (0, 1, 1000, 1_000_003)),
    *(
        (check, "int64", rows)
        for check in (collectives.check_all_gather, collectives.check_all_to_all)
        for rows in (1, 10_001)
    ),
    (collectives.check_split,),
    *((pointtopoint.check_exchange, "float32", count) for count in (0, 1001, 1_000_003)),
    (pointtopoint.check_many_in_flight, 200),
    (pointtopoint.check_beside_collectives,),
    *((check,) for check in (*channels.CHECKS, *asynchronous.CHECKS, *GRAPHS)),
]


def name(case):
    """For a test's identifier: `check_exchange-float32-1001`."""
    return "-".join([case[0].__name__, *map(str, case[1:])])
