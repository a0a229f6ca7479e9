"""What a process of the job of section `training` does. torch is imported where it is used: this module may be loaded without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xvcomm import pipeline
from xvcomm.adapters.torch import communicator
from xvcomm.cli.certify.child import Log
from xvcomm.comm.communicator import Communicator
from xvcomm.memory import vendors

if TYPE_CHECKING:
    import torch

_STEPS, _ROWS, _WIDTH, _MICRO_BATCHES, _RATE = 5, 8, 32, 4, 0.05
_TOLERANCE = 1e-5


def run(tell: Log) -> None:
    """Tell of each way to train (`name`, `losses`, `alone`, `apart`, `tolerance`)."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("xvcomm")
    comm = communicator()
    device = torch.device("cpu")
    if comm.device != "host":
        device = torch.device(vendors.of(comm.device).torch_device, comm.device_index)
        torch.cuda.set_device(device)
    for name, train in (("DDP", _by_ddp), ("pipeline", _by_pipeline)):
        losses, alone = train(comm, device)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
        tell(name=name, losses=losses, alone=alone, apart=apart, tolerance=_TOLERANCE)
    dist.destroy_process_group()


def _layers(depth: int, device: torch.device) -> list[torch.nn.Module]:
    """The same layers on every rank; the last one gives one number a row."""
    import torch

    torch.manual_seed(5)
    widths = [_WIDTH] * depth + [1]
    made = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return [layer.to(device) for layer in made]


def _rows(count: int, device: torch.device) -> tuple[Any, Any]:
    """Inputs and targets."""
    import torch

    chance = torch.Generator().manual_seed(6)
    x = torch.randn(count, _WIDTH, generator=chance)
    return x.to(device), torch.sin(x.sum(1, keepdim=True)).to(device)


def _loss(x: Any, target: Any) -> Any:
    return ((x - target) ** 2).mean()


def _alone(layers: Sequence[torch.nn.Module], x: Any, target: Any) -> list[float]:
    """Losses of one process."""
    import torch

    model = torch.nn.Sequential(*layers)
    descent, losses = torch.optim.SGD(model.parameters(), _RATE), []
    for _ in range(_STEPS):
        descent.zero_grad()
        loss = _loss(model(x), target)
        loss.backward()
        descent.step()
        losses.append(float(loss.detach()))
    return losses


def _by_ddp(comm: Communicator, device: torch.device) -> tuple[list[float], list[float]]:
    import torch
    import torch.distributed as dist

    x, target = _rows(_ROWS * comm.size, device)
    alone = _alone(_layers(3, device), x, target)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*_layers(3, device)))
    descent, losses = torch.optim.SGD(model.parameters(), _RATE), []
    mine = slice(comm.rank * _ROWS, (comm.rank + 1) * _ROWS)
    for _ in range(_STEPS):
        descent.zero_grad()
        loss = _loss(model(x[mine]), target[mine])
        loss.backward()
        descent.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(float(mean))
    return losses, alone


class _Stage:
    """One stage as `xvcomm.pipeline` drives it."""

    def __init__(self, layer: torch.nn.Module, first: bool, last: bool, rows: tuple[Any, Any]) -> None:
        self.layer, self._x, self._target = layer, rows[0] if first else None, rows[1] if last else None
        between = ((_ROWS, _WIDTH), "float32")
        self.input_spec, self.output_spec = None if first else between, None if last else between
        self._saved: dict[int, tuple[Any, Any]] = {}

    def forward(self, x: Any, micro_batch: int) -> Any:
        """See `xvcomm.pipeline.Stage.forward`."""
        part = slice(micro_batch * _ROWS, (micro_batch + 1) * _ROWS)
        given = self._x[part] if self._x is not None else x.requires_grad_()
        y = self.layer(given)
        if self._target is not None:
            y = _loss(y, self._target[part]) / _MICRO_BATCHES
        self._saved[micro_batch] = given, y
        return y.detach()

    def backward(self, dy: Any, micro_batch: int) -> Any:
        """See `xvcomm.pipeline.Stage.backward`."""
        x, y = self._saved.pop(micro_batch)
        y.backward(dy)
        return x.grad

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `xvcomm.pipeline.Stage.empty`."""
        import torch

        return torch.empty(shape, device=next(self.layer.parameters()).device)


def _by_pipeline(comm: Communicator, device: torch.device) -> tuple[list[float], list[float]]:
    import torch
    import torch.distributed as dist

    rows = _rows(_ROWS * _MICRO_BATCHES, device)
    alone = _alone(_layers(comm.size, device), *rows)
    layer = _layers(comm.size, device)[comm.rank]
    stage = _Stage(layer, comm.rank == 0, comm.rank == comm.size - 1, rows)
    pipe = pipeline.Pipeline(stage, comm, pipeline.build("1f1b", comm.size, _MICRO_BATCHES))
    descent, losses = torch.optim.SGD(layer.parameters(), _RATE), []
    for _ in range(_STEPS):
        descent.zero_grad()
        loss = torch.tensor(sum(map(float, pipe.run())), dtype=torch.float32, device=device)
        descent.step()
        dist.all_reduce(loss)
        losses.append(float(loss))
    return losses, alone
