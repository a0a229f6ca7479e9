"""Functional collectives, as DTensor, FSDP and compiled code call them: eager, traced, differentiated."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from ranks import RanksOfOneClass
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    """A rank's input: small whole numbers, so that sums and products are exact in any order."""
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).float()


class FunctionalCollectives(RanksOfOneClass):
    """`torch.distributed._functional_collectives` against the same operations in one process."""

    def _all(self, *shape: int) -> list[torch.Tensor]:
        return [of_rank(rank, *shape) for rank in range(self.world_size)]

    @parametrize("reduction", list(REDUCTIONS))
    def test_all_reduce(self, reduction: str) -> None:
        mine = of_rank(self.rank, 5, 3)
        found = funcol.all_reduce(mine, reduction, dist.group.WORLD)
        self.assertEqual(found, REDUCTIONS[reduction](torch.stack(self._all(5, 3)), 0))
        self.assertEqual(mine, of_rank(self.rank, 5, 3))  # the input stays as it is

    @parametrize("dtype", DTYPES)
    def test_all_reduce_of_dtype(self, dtype: torch.dtype) -> None:
        found = funcol.all_reduce(of_rank(self.rank, 33).to(dtype), "sum", dist.group.WORLD)
        self.assertEqual(found, torch.stack(self._all(33)).sum(0).to(dtype))

    def test_all_reduce_of_a_transposed_tensor(self) -> None:
        found = funcol.all_reduce(of_rank(self.rank, 4, 7).T, "sum", dist.group.WORLD)
        self.assertEqual(found, torch.stack(self._all(4, 7)).sum(0).T)

    @parametrize("shape", [(), (0,), (1,), (1 << 18,)])
    def test_all_reduce_of_shape(self, shape: tuple[int, ...]) -> None:
        found = funcol.all_reduce(of_rank(self.rank, *shape), "sum", dist.group.WORLD)
        self.assertEqual(found, torch.stack(self._all(*shape)).sum(0))

    @parametrize("dim", [0, 1])
    def test_all_gather_tensor(self, dim: int) -> None:
        found = funcol.all_gather_tensor(of_rank(self.rank, 2, 3), dim, dist.group.WORLD)
        self.assertEqual(found, torch.cat(self._all(2, 3), dim))

    @parametrize("dim", [0, 1])
    def test_reduce_scatter_tensor(self, dim: int) -> None:
        shape = (2 * self.world_size, 3 * self.world_size)
        found = funcol.reduce_scatter_tensor(of_rank(self.rank, *shape), "sum", dim, dist.group.WORLD)
        self.assertEqual(found, torch.stack(self._all(*shape)).sum(0).chunk(self.world_size, dim)[self.rank])

    def test_broadcast(self) -> None:
        source = self.world_size - 1
        self.assertEqual(funcol.broadcast(of_rank(self.rank, 6), source, dist.group.WORLD), of_rank(source, 6))

    def test_all_to_all_single(self) -> None:
        found = funcol.all_to_all_single(of_rank(self.rank, 2 * self.world_size), None, None, dist.group.WORLD)
        expected = [x.chunk(self.world_size)[self.rank] for x in self._all(2 * self.world_size)]
        self.assertEqual(found, torch.cat(expected))

    def _uneven(self) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
        """Rank r sends r + 1 elements to the first rank, r + 2 to the second, and so on."""
        counts = [[rank + peer + 1 for peer in range(self.world_size)] for rank in range(self.world_size)]
        inputs = [of_rank(rank, sum(counts[rank])) for rank in range(self.world_size)]
        expected = torch.cat([inputs[peer].split(counts[peer])[self.rank] for peer in range(self.world_size)])
        return [row[self.rank] for row in counts], counts[self.rank], inputs[self.rank], expected

    def test_all_to_all_single_of_uneven_parts(self) -> None:
        received, sent, mine, expected = self._uneven()
        self.assertEqual(funcol.all_to_all_single(mine, received, sent, dist.group.WORLD), expected)

    def test_permute_tensor(self) -> None:
        following = [(rank + 1) % self.world_size for rank in range(self.world_size)]
        found = funcol.permute_tensor(of_rank(self.rank, 4), following, dist.group.WORLD)
        self.assertEqual(found, of_rank((self.rank - 1) % self.world_size, 4))

    def test_coalesced(self) -> None:
        shapes = [(self.world_size, 2), (2 * self.world_size,)]
        mine = [of_rank(self.rank, *shape) for shape in shapes]
        sums = [torch.stack(self._all(*shape)).sum(0) for shape in shapes]
        self.assertEqual(funcol.all_reduce_coalesced(mine, "sum", dist.group.WORLD), sums)
        gathered = [torch.cat(self._all(*shape)) for shape in shapes]
        self.assertEqual(funcol.all_gather_into_tensor_coalesced(mine, dist.group.WORLD), gathered)
        scattered = [total.chunk(self.world_size)[self.rank] for total in sums]
        self.assertEqual(funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], dist.group.WORLD), scattered)

    def test_out_variants(self) -> None:
        ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        gathered = torch.zeros(3 * self.world_size)
        ops.all_gather_into_tensor_out(of_rank(self.rank, 3), self.world_size, group, out=gathered)
        self.assertEqual(ops.wait_tensor(gathered), torch.cat(self._all(3)))
        reduced = of_rank(self.rank, 3)
        ops.wait_tensor(ops.all_reduce_(reduced, "sum", group))
        self.assertEqual(reduced, torch.stack(self._all(3)).sum(0))

    def test_results_in_flight(self) -> None:
        """Many collectives are started before the first result is used."""
        started = [funcol.all_reduce(of_rank(self.rank, 1000) + i, "sum", dist.group.WORLD) for i in range(20)]
        total = torch.stack(self._all(1000)).sum(0)
        for i, found in reversed(list(enumerate(started))):
            self.assertEqual(found + 0, total + i * self.world_size)

    @parametrize("name", ["ranks", "group", "mesh", "mesh_and_dimension", "name"])
    def test_ways_to_name_a_group(self, name: str) -> None:
        mesh = self.build_device_mesh()
        group = {
            "ranks": list(range(self.world_size)), "group": dist.group.WORLD, "mesh": mesh,
            "mesh_and_dimension": (mesh, 0), "name": dist.group.WORLD.group_name,
        }[name]  # fmt: skip
        self.assertEqual(funcol.all_reduce(of_rank(self.rank, 4), "sum", group), torch.stack(self._all(4)).sum(0))

    def test_gradients(self) -> None:
        mine = of_rank(self.rank, 2 * self.world_size).requires_grad_()
        weight = of_rank(100 + self.rank, 2 * self.world_size * self.world_size)
        (funcol.all_gather_tensor_autograd(mine, 0, dist.group.WORLD) * weight).sum().backward()
        weights = [of_rank(100 + rank, weight.numel()) for rank in range(self.world_size)]
        self.assertEqual(mine.grad, torch.stack(weights).sum(0).chunk(self.world_size)[self.rank])
        mine.grad = None
        (funcol.reduce_scatter_tensor_autograd(mine, "sum", 0, dist.group.WORLD) * (self.rank + 1)).sum().backward()
        self.assertEqual(mine.grad, torch.arange(1.0, self.world_size + 1).repeat_interleave(2))

    def test_gradient_of_all_to_all_single(self) -> None:
        received, sent, mine, expected = self._uneven()
        mine.requires_grad_()
        found = funcol.all_to_all_single_autograd(mine, received, sent, dist.group.WORLD)
        self.assertEqual(found, expected)
        (found * (self.rank + 1)).sum().backward()
        self.assertEqual(mine.grad, torch.cat([torch.full((n,), peer + 1.0) for peer, n in enumerate(sent)]))

    @parametrize("how", ["eager", "aot_eager"])
    def test_compiled(self, how: str) -> None:
        def two_collectives(x: torch.Tensor) -> torch.Tensor:
            y = funcol.all_reduce(x * 2, "sum", world) + 1
            return funcol.reduce_scatter_tensor(funcol.all_gather_tensor(y, 0, world), "sum", 0, world)

        world = dist.group.WORLD
        torch._dynamo.reset()
        compiled = torch.compile(two_collectives, fullgraph=True, backend=how)
        expected = (torch.stack(self._all(3)).sum(0) * 2 + 1) * self.world_size
        self.assertEqual(compiled(of_rank(self.rank, 3)), expected)

    def test_compiled_collective_in_place(self) -> None:
        def in_place(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        torch._dynamo.reset()
        found = torch.compile(in_place, fullgraph=True, backend="aot_eager")(of_rank(self.rank, 3))
        self.assertEqual(found, torch.stack(self._all(3)).sum(0) * 2 + 1)


class DifferentiableCollectives(RanksOfOneClass):
    """`torch.distributed.nn.functional`: results and gradients."""

    def _mine(self, *shape: int) -> torch.Tensor:
        return of_rank(self.rank, *shape).requires_grad_()

    def _numbered(self) -> list[torch.Tensor]:
        return [torch.full((4,), peer + 1.0) for peer in range(self.world_size)]

    def test_all_reduce(self) -> None:
        mine = self._mine(4)
        (differentiable.all_reduce(mine) * (self.rank + 1)).sum().backward()
        self.assertEqual(mine.grad, torch.full((4,), self.world_size * (self.world_size + 1) / 2))

    def test_broadcast(self) -> None:
        mine = self._mine(4)
        found = differentiable.broadcast(mine, 0)
        self.assertEqual(found, of_rank(0, 4))
        found.sum().backward()
        self.assertEqual(mine.grad, torch.full((4,), float(self.world_size) if self.rank == 0 else 0.0))

    def test_all_gather(self) -> None:
        mine = self._mine(4)
        found = differentiable.all_gather(mine)
        self.assertEqual(list(found), [of_rank(rank, 4) for rank in range(self.world_size)])
        (torch.stack(found).sum() * (self.rank + 1)).backward()
        self.assertEqual(mine.grad, torch.full((4,), self.world_size * (self.world_size + 1) / 2))

    def test_reduce_scatter(self) -> None:
        parts = [self._mine(4) for _ in range(self.world_size)]
        found = differentiable.reduce_scatter(torch.empty(4), parts)
        self.assertEqual(found, sum(of_rank(rank, 4) for rank in range(self.world_size)))
        (found * (self.rank + 1)).sum().backward()
        self.assertEqual([part.grad for part in parts], self._numbered())

    def test_all_to_all_single(self) -> None:
        mine = self._mine(2 * self.world_size)
        found = differentiable.all_to_all_single(torch.empty(2 * self.world_size), mine)
        (found * (self.rank + 1)).sum().backward()
        self.assertEqual(mine.grad, torch.arange(1.0, self.world_size + 1).repeat_interleave(2))

    def test_gather(self) -> None:
        mine = self._mine(4)
        found = differentiable.gather(mine, 0)
        if self.rank == 0:
            self.assertEqual(list(found), [of_rank(rank, 4) for rank in range(self.world_size)])
        (torch.stack(found) * 3).sum().backward()  # elsewhere than on rank 0 this reaches nobody
        self.assertEqual(mine.grad, torch.full((4,), 3.0))

    def test_scatter(self) -> None:
        parts = [of_rank(10 + peer, 4).requires_grad_() for peer in range(self.world_size)]
        found = differentiable.scatter(parts, 0)
        self.assertEqual(found, of_rank(10 + self.rank, 4))
        (found * (self.rank + 1)).sum().backward()
        if self.rank == 0:
            self.assertEqual([part.grad for part in parts], self._numbered())


instantiate_parametrized_tests(FunctionalCollectives)
CLASSES = (FunctionalCollectives, DifferentiableCollectives)
