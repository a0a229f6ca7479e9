"""Elastic training in the example: what it does after errors of `grow`."""

import sys
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama.elastic import Elastic

from xvcomm.errors import Aborted, DeadlineExceeded, PeerLost


@pytest.mark.parametrize("error", [PeerLost, DeadlineExceeded, Aborted])
def test_goes_on_if_growing_fails(error):
    """It goes on with the ranks that are left."""
    comm = mock.MagicMock(rank=0, size=1, job_ranks=(0,))
    comm.all_gather_object.return_value = [1]
    comm.broadcast_object.return_value = 1
    comm.grow.side_effect = error("grow: too late")
    left = comm.shrink.return_value
    left.all_gather_object.return_value = [2]
    elastic = Elastic(comm, mock.Mock(), mock.Mock(), mock.Mock(), 1, 1)

    def step():
        elastic.progress.losses.append(0.5)

    with mock.patch.object(elastic, "_step", step):
        assert elastic.run(1).losses == [0.5]
    assert elastic.comm is left
    left.barrier.assert_called_once()
