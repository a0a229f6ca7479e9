"""send, recv and sendrecv. Cotangents travel in the opposite direction: send and recv are each other's transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, batching

from xvcomm.adapters.jax import arguments
from xvcomm.adapters.jax.communicators import chosen
from xvcomm.adapters.jax.derivatives import behind, cotangents_of, for_operands, links, unless_constant
from xvcomm.adapters.jax.primitives import bind, bind_batch, primitive, tokens_of
from xvcomm.adapters.jax.specs import ANY, TAGS, MessageSpec
from xvcomm.adapters.jax.status import ANY_SOURCE, ANY_TAG, Slot
from xvcomm.adapters.jax.tokens import given_back, make_token
from xvcomm.adapters.jax.versions import zero_tangent
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.trace.operation import ANY_PEER

send_p = primitive("send")
recv_p = primitive("recv")
sendrecv_p = primitive("sendrecv")

_TANGENT, _COTANGENT = TAGS, 2 * TAGS
"""Bits in the tags of derivatives' messages, so that they are not mistaken for values."""


def send(
    x: Any, dst: int, tag: int = 0, *, channel: int = 0, comm: Communicator | None = None, token: Any = None
) -> Any:
    """Send an array to rank `dst`.

    The derivative receives the array's cotangent from `dst`. For that the loss must depend on this call: add the receipt to it.
    The receiver must differentiate too.

    Args:
        x: array of any dtype that xvcomm supports.
        dst: another rank.
        tag: checked by the receiver, not searched; up to 2**60.
        channel: messages of one channel between two ranks are received in the order in which they are sent.
        comm, token: as in `all_reduce`, which also lists the errors.

    Returns:
        A receipt, a float32 scalar that is zero; with `token`, the next token, which serves the same purpose.
    """
    comm, x = chosen(comm), arguments.array("send", x)
    carrier = arguments.token("send", token)
    spec = MessageSpec(
        comm=comm, dst=arguments.peer("send", "dst", dst, comm), send_tag=_tag("send", tag),
        channel=arguments.channel("send", channel), call_site=arguments.call_site(), carried=True, ordered=not carrier,
    )  # fmt: skip
    return bind(send_p, x, *(carrier or [make_token()]), spec=spec)[0]


def recv(
    like: Any, src: int | None, tag: int | None = 0, *, channel: int = 0, comm: Communicator | None = None,
    token: Any = None, status: Any = None,
) -> Any:  # fmt: skip
    """Receive an array from rank `src`, or from any rank.

    The derivative sends the array's cotangent to `src`. For that `like` must be differentiated: make it an argument of the
    function, and list its number in `argnums`; its derivative is zero. With any rank or any tag there is no derivative.

    Args:
        like: defines shape and dtype: an array, whose elements are not used, or a `jax.ShapeDtypeStruct`.
        src: another rank; ANY_SOURCE takes the next message of any rank, in round-robin order.
        tag, channel: as in `send`; ANY_TAG accepts any tag. The tag is always checked, not searched.
        comm, token: as in `all_reduce`, which also lists the errors.
        status: a `Status`, or mpi4py's, which gets source and tag of the message when it is received.

    Returns:
        The array; with `token`, that and the next token.
    """
    comm, like = chosen(comm), arguments.like("recv", like)
    if src is ANY_SOURCE and comm.size == 1:
        raise ArgumentError("recv: this communicator has no other rank")
    carrier = arguments.token("recv", token)
    spec = MessageSpec(
        src=ANY_PEER if src is ANY_SOURCE else arguments.peer("recv", "src", src, comm),
        recv_tag=ANY if tag is ANY_TAG else _tag("recv", tag), channel=arguments.channel("recv", channel),
        status=None if status is None else Slot("recv", status), **arguments.shared(comm, carrier),
    )  # fmt: skip
    return given_back(bind(recv_p, like, *carrier, spec=spec), token)


def sendrecv(
    x: Any, dst: int, like: Any, src: int, send_tag: int = 0, recv_tag: int = 0, *, channel: int = 0,
    comm: Communicator | None = None, token: Any = None,
) -> Any:  # fmt: skip
    """Send to one rank and receive from another (or the same) concurrently; returns the received array.

    If both are this rank itself nothing is sent, and `x` is returned. Arguments and errors as in `send` and `recv`. The
    derivative sends the cotangent to `src` and receives from `dst`.
    """
    comm, x, like = chosen(comm), arguments.array("sendrecv", x), arguments.like("sendrecv", like)
    carrier = arguments.token("sendrecv", token)
    if comm.rank == arguments.rank("sendrecv", "dst", dst, comm) == arguments.rank("sendrecv", "src", src, comm):
        return given_back([_own(x, like, send_tag, recv_tag), *carrier], token)
    spec = MessageSpec(
        dst=arguments.peer("sendrecv", "dst", dst, comm), src=arguments.peer("sendrecv", "src", src, comm),
        send_tag=_tag("sendrecv", send_tag), recv_tag=_tag("sendrecv", recv_tag),
        channel=arguments.channel("sendrecv", channel), **arguments.shared(comm, carrier),
    )  # fmt: skip
    return given_back(bind(sendrecv_p, x, like, *carrier, spec=spec), token)


def _tag(op: str, tag: Any) -> int:
    number = arguments.whole(op, "tag", tag)
    if not 0 <= number < TAGS:
        raise ArgumentError(f"{op}: tag {number}: must be an integer from 0 to 2**60 - 1")
    return number


def _own(x: Any, like: Any, send_tag: Any, recv_tag: Any) -> Any:
    """Result of a rank that exchanges with itself."""
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ArrayError(
            f"sendrecv of a rank with itself: x is {x.dtype}{list(x.shape)} and like is {like.dtype}{list(like.shape)}; "
            "both must be equal"
        )
    if _tag("sendrecv", send_tag) != _tag("sendrecv", recv_tag):
        raise ArgumentError(
            f"sendrecv of a rank with itself: send_tag {send_tag} and recv_tag {recv_tag} must be equal"
        )
    return x


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _jvp_send(primals: Sequence[Any], tangents: Sequence[Any], *, spec: MessageSpec) -> Any:
    """Also send the tangent."""
    results = bind(send_p, *primals, spec=spec)
    if not _inexact(primals[0]):
        return results, [tangents[1]]
    operands, other = behind(results, tangents, spec)
    return results, bind(send_p, *operands, spec=other.tagged(_TANGENT))


def _transpose_send(cotangents: Sequence[Any], *operands: Any, spec: MessageSpec) -> list[Any]:
    """Receive the array's cotangent, ordered by the token's cotangent, if there is a token."""
    like = jnp.zeros(operands[0].aval.shape, operands[0].aval.dtype)
    other = spec.reversed().tagged(_COTANGENT)
    if spec.ordered:
        results = bind(recv_p, like, spec=other.but(carried=False))
    else:
        results = bind(recv_p, like, *cotangents_of(cotangents), *links(spec, operands), spec=other)
    return for_operands(results, operands)


def _jvp_recv(primals: Sequence[Any], tangents: Sequence[Any], *, spec: MessageSpec) -> Any:
    """Also receive the tangent."""
    if spec.wild:
        return unless_constant(recv_p, primals, tangents, spec)
    results = bind(recv_p, *primals, spec=spec)
    if not _inexact(primals[0]):
        return results, [zero_tangent(results[0]), *tokens_of(spec, tangents)[:1]]
    operands, other = behind(results, tangents, spec)
    return results, bind(recv_p, *operands, spec=other.tagged(_TANGENT))


def _transpose_recv(cotangents: Sequence[Any], *operands: Any, spec: MessageSpec) -> list[Any]:
    """Send the array's cotangent. That of `like` is zero, computed from the receipt so that the message is kept."""
    x, *token = cotangents_of(cotangents)
    other = spec.reversed().tagged(_COTANGENT).but(carried=True)
    (receipt,) = bind(send_p, x, *(token or [make_token()]), *links(spec, operands), spec=other)
    unused = jnp.broadcast_to((receipt * 0).astype(x.dtype), x.shape)
    return for_operands([unused, *[receipt] * len(token)], operands)


def _jvp_sendrecv(primals: Sequence[Any], tangents: Sequence[Any], *, spec: MessageSpec) -> Any:
    """Also exchange the tangents."""
    x, like, *_ = primals
    results = bind(sendrecv_p, *primals, spec=spec)
    if _inexact(x) != _inexact(like):
        raise ArgumentError(
            f"sendrecv of {x.dtype} for {like.dtype} has no derivative: only one of them is differentiable; use send and recv"
        )
    if not _inexact(x):
        return results, [zero_tangent(results[0]), *tokens_of(spec, tangents)[:1]]
    operands, other = behind(results, tangents, spec)
    return results, bind(sendrecv_p, operands[0], like, *operands[2:], spec=other.tagged(_TANGENT))


def _transpose_sendrecv(cotangents: Sequence[Any], *operands: Any, spec: MessageSpec) -> list[Any]:
    """Exchange the cotangents in the opposite direction."""
    y, *token = cotangents_of(cotangents)
    like = jnp.zeros(operands[0].aval.shape, operands[0].aval.dtype)
    other = spec.reversed().tagged(_COTANGENT)
    results = bind(sendrecv_p, y, like, *token, *links(spec, operands), spec=other)
    return for_operands([results[0], jnp.zeros_like(y), *results[1:]], operands)


def _batch_send(operands: Sequence[Any], dims: Sequence[Any], *, spec: MessageSpec) -> Any:
    x = operands[0] if dims[0] is None else jnp.moveaxis(operands[0], dims[0], 0)
    return bind_batch(send_p, [x], operands, dims, None, spec)


def _batch_recv(operands: Sequence[Any], dims: Sequence[Any], *, spec: MessageSpec) -> Any:
    like = operands[0] if dims[0] is None else jnp.moveaxis(operands[0], dims[0], 0)
    return bind_batch(recv_p, [like], operands, dims, None if dims[0] is None else 0, spec)


def _batch_sendrecv(operands: Sequence[Any], dims: Sequence[Any], *, spec: MessageSpec) -> Any:
    """Exchange the whole batch; an array without a batch dimension is repeated for each of its members."""
    pairs = list(zip(operands[:2], dims[:2], strict=True))
    size = next((x.shape[dim] for x, dim in pairs if dim is not None), None)
    if size is None:
        return bind_batch(sendrecv_p, operands[:2], operands, dims, None, spec)
    arrays = [jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    return bind_batch(sendrecv_p, arrays, operands, dims, 0, spec)


ad.primitive_jvps[send_p], ad.primitive_transposes[send_p] = _jvp_send, _transpose_send
ad.primitive_jvps[recv_p], ad.primitive_transposes[recv_p] = _jvp_recv, _transpose_recv
ad.primitive_jvps[sendrecv_p], ad.primitive_transposes[sendrecv_p] = _jvp_sendrecv, _transpose_sendrecv
batching.primitive_batchers[send_p] = _batch_send
batching.primitive_batchers[recv_p] = _batch_recv
batching.primitive_batchers[sendrecv_p] = _batch_sendrecv
