"""A rank closes a communicator and lives on, and the others go on without it, also where they are on other hosts."""

import pytest
from shrinking import shrunk, works

from xvcomm.errors import PeerLost
from xvcomm.testing.world import World


def go_on(comm, which):
    group = comm.split(0)
    if comm.rank == which:
        group.barrier()
        group.close()
    else:
        with pytest.raises(PeerLost):
            group.barrier()  # fails, too, if a rank whose next one has failed stops the group before this one is done
            group.barrier()
        made, _ = shrunk(group)
        works(made, [rank for rank in range(comm.size) if rank != which])
        made.close()
    comm.barrier()


def test_shrink_after_an_error_by_a_departure():
    """What has ended the operation is known to the ranks: news by way of the store may be later."""
    with World(hosts="a,b,a,b", timeout=100) as world:
        for which in range(4):
            world.run(go_on, which)
