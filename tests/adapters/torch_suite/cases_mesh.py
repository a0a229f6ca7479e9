"""Device meshes, and process groups of subsets of ranks, over the backend."""

from __future__ import annotations

import unittest

import torch
import torch.distributed as dist
from ranks import RanksOfOneClass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._collective_utils import mesh_broadcast, mesh_scatter

FOUR = unittest.skipIf(RanksOfOneClass.world_size < 4, "needs four ranks")


class Mesh(RanksOfOneClass):
    """Meshes of one and two dimensions: coordinates, groups, slices, and collectives along them."""

    def _sum(self, group: dist.ProcessGroup) -> float:
        x = torch.full((3,), float(2**self.rank))
        dist.all_reduce(x, group=group)
        return x[0].item()

    def test_one_dimension(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp",))
        self.assertEqual((mesh.get_local_rank(), mesh.get_coordinate()), (self.rank, [self.rank]))
        self.assertEqual(mesh.size(), self.world_size)
        self.assertEqual(self._sum(mesh.get_group("dp")), 2**self.world_size - 1)
        self.assertEqual(dist.get_backend(mesh.get_group()), self.backend_str())

    def test_from_group(self) -> None:
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        self.assertEqual(self._sum(mesh.get_group()), 2**self.world_size - 1)

    def test_dimensions_of_one_rank(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size, 1), mesh_dim_names=("dp", "tp"))
        self.assertEqual(self._sum(mesh["tp"].get_group()), 2**self.rank)
        self.assertEqual(self._sum(mesh["dp"].get_group()), 2**self.world_size - 1)

    @FOUR
    def test_two_dimensions(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.assertEqual(self._sum(mesh["tp"].get_group()), {0: 1 + 2, 1: 4 + 8}[self.rank // 2])
        self.assertEqual(self._sum(mesh.get_group("dp")), {0: 1 + 4, 1: 2 + 8}[self.rank % 2])
        self.assertEqual(mesh.get_coordinate(), [self.rank // 2, self.rank % 2])

    @FOUR
    def test_flattened(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        self.assertEqual(self._sum(mesh["dp", "cp"]._flatten("dp_cp").get_group()), 15)

    @FOUR
    def test_any_order_of_ranks(self) -> None:
        mesh = DeviceMesh("cpu", [[3, 0], [1, 2]])
        self.assertEqual(self._sum(mesh.get_group(1)), 1 + 8 if self.rank in (0, 3) else 2 + 4)
        self.assertEqual(self._sum(mesh.get_group(0)), 8 + 2 if self.rank in (3, 1) else 1 + 4)

    def test_mesh_collectives(self) -> None:
        mesh = self.build_device_mesh()
        x = torch.full((2, 3), float(self.rank))
        mesh_broadcast(x, mesh)
        self.assertEqual(x, torch.zeros(2, 3))
        parts = [torch.full((2,), float(peer)) for peer in range(self.world_size)]
        mesh_scatter(x := torch.empty(2), parts, mesh)
        self.assertEqual(x, torch.full((2,), float(self.rank)))


class Groups(RanksOfOneClass):
    """Groups created in all ways that c10d has, and destroyed again."""

    def test_groups_of_one_rank(self) -> None:
        groups = [dist.new_group([rank]) for rank in range(self.world_size)]
        x = torch.ones(3)
        dist.all_reduce(x, group=groups[self.rank])
        dist.all_gather(parts := [torch.empty(3)], x, group=groups[self.rank])
        self.assertEqual(parts[0], torch.ones(3))

    def test_many_groups_at_once(self) -> None:
        groups = [dist.new_group() for _ in range(8)]
        tensors = [torch.full((4,), float(i)) for i in range(8)]
        started = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(tensors, groups, strict=True)]
        for i, work in reversed(list(enumerate(started))):
            work.wait()
            self.assertEqual(tensors[i], torch.full((4,), float(i * self.world_size)))
        for group in groups:
            dist.destroy_process_group(group)

    def test_reversed_ranks(self) -> None:
        group = dist.new_group(list(reversed(range(self.world_size))))
        dist.all_gather_into_tensor(x := torch.empty(self.world_size), torch.tensor([float(self.rank)]), group=group)
        # c10d sorts the ranks of a group.
        self.assertEqual(x, torch.arange(float(self.world_size)))

    def test_local_synchronization(self) -> None:
        pair = [self.rank // 2 * 2, self.rank // 2 * 2 + 1]
        group = dist.new_group(pair, use_local_synchronization=True)
        dist.all_reduce(x := torch.tensor([1 << self.rank]), group=group)
        self.assertEqual(x.item(), sum(1 << rank for rank in pair))
        dist.barrier()

    def test_second_backend_beside(self) -> None:
        """A gloo group does not affect the backend's groups."""
        other = dist.new_group(backend="gloo")
        works = [dist.all_reduce(torch.ones(2), async_op=True, group=group) for group in (other, None, other, None)]
        for work in works:
            work.wait()
        dist.all_gather_object(found := [None] * self.world_size, self.rank, group=other)
        self.assertEqual(found, list(range(self.world_size)))

    def test_messages_in_a_batch(self) -> None:
        following, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        sent = torch.full((70_000,), float(self.rank))
        received = torch.empty(70_000)
        operations = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(operations if self.rank % 2 else operations[::-1]):
            work.wait()
        self.assertEqual(received, torch.full((70_000,), float(before)))

    def test_tags_out_of_order(self) -> None:
        if self.rank == 0:
            for work in [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 8, 9)]:
                work.wait()
        elif self.rank == 1:
            for tag in (9, 7, 8):
                dist.recv(x := torch.empty(1), 0, tag=tag)
                self.assertEqual(x.item(), tag)

    def test_objects(self) -> None:
        dist.all_gather_object(found := [None] * self.world_size, {"rank": self.rank, "x": torch.ones(self.rank)})
        self.assertEqual([part["x"].numel() for part in found], list(range(self.world_size)))
        dist.broadcast_object_list(found := [{"root"} if self.rank == 1 else None], src=1)
        self.assertEqual(found, [{"root"}])
        if self.rank == 0:
            dist.send_object_list(["a", 1], dst=1)
        elif self.rank == 1:
            dist.recv_object_list(found := [None, None], src=0)
            self.assertEqual(found, ["a", 1])


CLASSES = (Mesh, Groups)
