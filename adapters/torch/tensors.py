"""Conversion of tensors to what the core accepts: contiguous, on the communicator's device; and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xvcomm.adapters.torch import versions
from xvcomm.adapters.torch.errors import as_torch
from xvcomm.errors import ArrayError, DTypeError, MismatchError
from xvcomm.memory.array_view import ArrayView, new_kind
from xvcomm.types.dtype import BY_NAME, DType

_STRIDED = torch.strided  # looked up once: these lookups matter in the cost of a small operation
_DTYPES: dict[torch.dtype, DType] = {getattr(torch, name): found for name, found in BY_NAME.items()}
_kinds: dict[tuple[torch.dtype, int, int], int] = {}
_KINDS_KEPT = 1000


def view(x: Tensor, kind: str, stream: int | None = None) -> ArrayView:
    """A one-dimensional view of a contiguous tensor's elements.

    The core could create it through DLPack, which takes three times as long.

    Args:
        kind: device type of its device in xvcomm.
        stream: handle of the current stream there.

    Raises:
        DTypeError: its dtype is not supported.
        ArrayError: it has elements but no memory.
    """
    dtype = _DTYPES.get(x.dtype)
    if dtype is None:
        raise DTypeError(f"{x.dtype} is not supported by xvcomm; convert the tensor to one of {', '.join(BY_NAME)}")
    count, address = x.numel(), x.data_ptr()
    if not address and count:
        result = versions.awaited(x)
        if result is not None:
            return view(result, kind, stream)
        raise ArrayError(f"a tensor of {count} elements without memory: it is a fake tensor, or its storage was freed")
    nbytes = count * dtype.itemsize
    if stream is None:
        return ArrayView(address, (count,), dtype, count, nbytes, x, kind, 0)
    index = x.get_device()
    form = x.dtype, count, index
    number = _kinds.get(form) or _number(form)
    return ArrayView(address, (count,), dtype, count, nbytes, x, kind, index, False, None, False, stream, True, number)


def _number(form: tuple[torch.dtype, int, int]) -> int:
    """An identifier of this dtype, number of elements and GPU, for lookups of compiled calls."""
    if len(_kinds) >= _KINDS_KEPT:
        _kinds.clear()
    found = _kinds[form] = new_kind()
    return found


def plain(x: Tensor) -> bool:
    """Whether a tensor's memory can be used directly: it is contiguous, and not a lazily negated or conjugated view."""
    return x.layout is _STRIDED and x.is_contiguous() and not (x.is_neg() or x.is_conj())


def dense(x: Tensor, device: torch.device | None) -> Tensor:
    """`x` itself if its memory can be used directly, else a contiguous copy; on `device` if one is given.

    Raises:
        ArrayError: the tensor is sparse.
    """
    if x.layout is not torch.strided:
        raise ArrayError(f"a tensor of layout {x.layout} has no plain memory; only all_reduce takes sparse tensors")
    if device is None and plain(x):
        return x
    with torch.no_grad():
        return x.detach().to(device or x.device).resolve_conj().resolve_neg().contiguous()


def room(x: Tensor, device: torch.device | None) -> Tensor:
    """A tensor for a result of `x`: `x` itself, or a contiguous temporary for `settle`."""
    if device is None and plain(x):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=device or x.device)


def settle(result: Tensor, x: Tensor) -> None:
    """Copy a result to `x`, if it is not there already."""
    if result is not x:
        with torch.no_grad():
            x.detach().copy_(result.view(x.shape))


def joined(parts: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """All elements in one flat tensor; a view if the parts are contiguous."""
    first = parts[0]
    base = _run(parts) if device is None else None
    if base is not None:
        return base
    with torch.no_grad():
        return torch.cat([p.detach().to(device or first.device).reshape(-1) for p in parts])


def room_for(parts: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """A flat tensor for results of all parts: a view if they are contiguous."""
    base = _run(parts) if device is None else None
    if base is not None:
        return base
    return torch.empty(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=device or parts[0].device)


def spread(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy a flat result to the parts, if it is not a view of them."""
    if not flat.numel() or flat.data_ptr() == parts[0].data_ptr():
        return
    with torch.no_grad():
        for part, piece in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.detach().copy_(piece.view(part.shape))


def apart(out: Tensor, whole: Tensor, own: Tensor) -> bool:
    """Whether `out` may be written while other ranks' blocks are read: it overlaps no block except this rank's own."""
    at, begin = out.data_ptr(), whole.data_ptr()
    return at == own.data_ptr() or at + out.nbytes <= begin or begin + whole.nbytes <= at


def same_dtype(tensors: Sequence[Tensor], what: str) -> None:
    """Raise MismatchError unless all have one dtype."""
    if len({t.dtype for t in tensors}) > 1:
        kinds = ", ".join(sorted({str(t.dtype) for t in tensors}))
        raise MismatchError(f"{what}: the tensors have different dtypes ({kinds}); convert them to one")


def on_one_device(tensors: Sequence[Tensor]) -> None:
    """Raise ArrayError unless all are on one device."""
    place = tensors[0].device
    for other in tensors:
        if other.device != place:
            raise as_torch(ArrayError(
                f"the tensors of one call are on {place} and on {other.device}; move all of them to one device"
            ))  # fmt: skip


def _run(parts: Sequence[Tensor]) -> Tensor | None:
    """A flat view over parts that are contiguous in memory; None if they are not."""
    at = parts[0].data_ptr()
    count = 0
    for part in parts:
        if part.data_ptr() != at or not plain(part):
            return None
        at += part.nbytes
        count += part.numel()
    first = parts[0].detach()
    storage: Any = first.untyped_storage()
    begin = first.storage_offset()
    if not count or (begin + count) * first.element_size() > storage.nbytes():
        return None
    if any(p.untyped_storage().data_ptr() != storage.data_ptr() for p in parts[1:]):
        return None
    return first.as_strided((count,), (1,), begin)
