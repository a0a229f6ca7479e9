"""The JAX adapter on GPUs: operations on XLA's stream, between islands, with ranks on host memory, without host waits.

Each rank sees all GPUs and uses its own: `comm.device_index` is also its index in JAX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World

pytestmark = pytest.mark.gpu
pytest.importorskip("jax")

Job = Callable[..., World]
JOBS = {
    "one island of 2": ("cuda:2", "a:2"),
    "1 and 1": ("cuda:2", "a,b"),
    "2 and 2": ("cuda:4", "a:2,b:2"),
    "cuda and host": ("cuda:1,host:1", None),
}
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
DTYPES = ("float32", "float16", "bfloat16", "int32", "uint8", "complex64")


@pytest.fixture(scope="module", params=JOBS)
def world(job: Job, request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks of each job in turn."""
    with job(*JOBS[request.param], env=ENVIRONMENT) as ranks:
        why = ranks.run(missing)
        if any(why):
            pytest.skip(next(filter(None, why)))
        yield ranks


@pytest.fixture(scope="module")
def pair(job: Job) -> Iterator[World]:
    """Two GPUs in separate islands."""
    with job("cuda:2", "a,b", env=ENVIRONMENT) as ranks:
        why = ranks.run(missing)
        if any(why):
            pytest.skip(next(filter(None, why)))
        yield ranks


def missing(comm: Communicator) -> str:
    """Why JAX does not support this rank's device, or an empty text."""
    try:
        import jax

        device(comm)
        return "" if jax.numpy.ones(3, device=device(comm)).sum() == 3 else "JAX adds wrongly"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def device(comm: Communicator) -> Any:
    """This rank's device in JAX."""
    import jax

    if comm.device == "host":
        return jax.devices("cpu")[0]
    return next(d for d in jax.local_devices(backend="gpu") if d.local_hardware_id == comm.device_index)


def put(comm: Communicator, x: Any) -> Any:
    """An array on this rank's device."""
    import jax

    return jax.device_put(x, device(comm))


def forms() -> dict[str, Callable[..., Any]]:
    """Ways to call an operation of one array."""
    import jax

    from xvcomm.adapters import jax as xvjax

    return {
        "eager": lambda f, x: f(x),
        "jit": lambda f, x: jax.jit(f)(x),
        "token": lambda f, x: jax.jit(lambda x, t: f(x, token=t))(x, put_token(x, xvjax.make_token()))[0],
    }


def put_token(x: Any, token: Any) -> Any:
    """A token where an array is."""
    import jax

    return jax.device_put(token, next(iter(x.devices())))


def operations(comm: Communicator, form: str, dtype: str) -> None:
    """Every operation against numpy, and results on the rank's device."""
    import jax.numpy as jnp

    from xvcomm.adapters import jax as xvjax

    rank, size, run, last = comm.rank, comm.size, forms()[form], comm.size - 1
    kind = jnp.dtype(dtype)
    arrays = [(np.arange(size * 6) % 3 + r).astype(kind).reshape(2 * size, 3) for r in range(size)]
    mine, total = put(comm, arrays[rank]), sum(arrays[1:], arrays[0])
    own = slice(2 * rank, 2 * rank + 2)
    before, after = (rank - 1) % size, (rank + 1) % size

    def call(name: str, *arguments: Any, **options: Any) -> Any:
        found = run(lambda x, **k: getattr(xvjax, name)(x, *arguments, comm=comm, **options, **k), mine)
        assert found is None or found.devices() == {device(comm)}, name
        return found

    def same(found: Any, expected: Any, name: str) -> None:
        found = np.asarray(found)
        assert found.dtype == expected.dtype and (found == expected).all(), (name, found, expected)

    same(call("all_reduce"), total, "all_reduce")
    if kind.kind != "c":
        same(call("all_reduce", "max"), np.maximum.reduce(arrays), "max")
    same(call("reduce", last), total if rank == last else arrays[rank], "reduce")
    same(call("reduce_scatter"), total[own], "reduce_scatter")
    same(call("broadcast", last), arrays[last], "broadcast")
    same(call("all_gather"), np.concatenate(arrays), "all_gather")
    gathered = call("gather", last)
    if rank == last:
        same(gathered, np.concatenate(arrays), "gather")
    same(call("scatter", last), arrays[last][own], "scatter")
    same(call("all_to_all"), np.concatenate([a[own] for a in arrays]), "all_to_all")
    found = run(lambda x, **k: xvjax.sendrecv(x, after, x, before, comm=comm, **k), mine)
    same(found, arrays[before], "sendrecv")


@pytest.mark.parametrize("form", ["eager", "jit", "token"])
def test_operations(world: World, form: str) -> None:
    world.run(operations, form, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(world: World, dtype: str) -> None:
    world.run(operations, "jit", dtype)


def programs(comm: Communicator) -> None:
    """Work of XLA before, between and after operations, in loops, with derivatives; also large arrays."""
    import jax
    import jax.numpy as jnp

    from xvcomm.adapters import jax as xvjax

    x = put(comm, np.linspace(0, 1, 1_000_003, dtype=np.float32))

    def step(x: Any) -> Any:
        y = jnp.sin(x) * (comm.rank + 1)
        y = xvjax.all_reduce(y, comm=comm)
        z = xvjax.all_reduce(jnp.cos(y), "avg", comm=comm)
        return y + z

    ranks = comm.size * (comm.size + 1) / 2
    y = np.sin(np.linspace(0, 1, 1_000_003, dtype=np.float32)) * ranks
    program = jax.jit(step)
    for _ in range(10):
        np.testing.assert_allclose(program(x), y + np.cos(y), rtol=1e-4, atol=1e-5)

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        return xvjax.all_reduce(carry, "avg", comm=comm), None

    loop = jax.jit(lambda x: jax.lax.scan(body, x, None, length=50)[0])
    np.testing.assert_allclose(loop(x), x, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: (xvjax.all_reduce(x**2, comm=comm) * (comm.rank + 1)).sum()))(x)
    np.testing.assert_allclose(gradient, 2 * np.asarray(x) * ranks, rtol=1e-5)


def test_programs(world: World) -> None:
    world.run(programs)


def enqueues(comm: Communicator) -> None:
    """A rank whose peer is late dispatches its program and continues."""
    import jax

    from xvcomm.adapters import jax as xvjax

    x = put(comm, np.ones(100_000, np.float32))
    program = jax.jit(lambda x, t: xvjax.all_reduce(x, comm=comm, token=t))
    token = put(comm, xvjax.make_token())
    jax.block_until_ready(program(x, token))
    comm.barrier()
    if comm.rank:
        time.sleep(1.0)
    begin = time.monotonic()
    y, _ = program(x, token)
    dispatched = time.monotonic() - begin
    assert (np.asarray(y) == comm.size).all()
    waited = time.monotonic() - begin
    assert dispatched < 0.3, dispatched
    assert comm.rank or waited > 0.7, waited


def test_the_host_does_not_wait(pair: World) -> None:
    pair.run(enqueues)


def refusals(comm: Communicator) -> None:
    """Arrays on another GPU, and in host memory."""
    import jax

    from xvcomm.adapters import jax as xvjax
    from xvcomm.errors import ArrayError

    other = next(d for d in jax.local_devices(backend="gpu") if d.local_hardware_id != comm.device_index)
    reduce = jax.jit(lambda x: xvjax.all_reduce(x, comm=comm))
    with pytest.raises(ArrayError, match=f"rank's device is {comm.device}:"), xvjax.named_errors():
        reduce(jax.device_put(np.ones(3, np.float32), other)).block_until_ready()
    with pytest.raises(ArrayError, match=f"is on cpu but this rank's device is {comm.device}"):
        xvjax.all_reduce(jax.device_put(np.ones(3, np.float32), jax.devices("cpu")[0]), comm=comm)
    with pytest.raises(ArrayError, match=f"compiled for cpu but this rank's device is {comm.device}"):
        on_cpu = jax.device_put(np.ones(3, np.float32), jax.devices("cpu")[0])
        reduce(on_cpu)


def test_wrong_devices(pair: World, gpus: int) -> None:
    if gpus < 2:
        pytest.skip(f"an array on a second GPU, and {gpus} GPUs")
    pair.run(refusals)


def several(comm: Communicator) -> None:
    """One process with two GPUs: they reduce among themselves, and the rank's own communicates."""
    import jax

    from xvcomm.adapters import jax as xvjax

    P = jax.sharding.PartitionSpec
    gpus = jax.local_devices(backend="gpu")
    first = device(comm)
    second = next(d for d in gpus if d != first)
    mesh = jax.sharding.Mesh(np.array([second, first]), ("d",))
    blocks = np.stack([np.arange(6, dtype=np.float32) + 10 * i for i in range(2)])
    x = jax.device_put(blocks * (comm.rank + 1), jax.sharding.NamedSharding(mesh, P("d")))
    reduce = jax.shard_map(
        lambda x: xvjax.all_reduce(x, comm=comm, axis_name="d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    expected = blocks.sum(0, keepdims=True) * comm.size * (comm.size + 1) / 2
    for _ in range(3):
        np.testing.assert_array_equal(jax.jit(reduce)(x), expected)


def test_two_gpus_in_one_process(job: Job, gpus: int) -> None:
    """One rank, which suffices for XLA's part; the other tests cover the border."""
    if gpus < 2:
        pytest.skip(f"2 GPUs in one process, and {gpus} GPUs")
    with job("cuda:1", env=ENVIRONMENT) as alone:
        why = alone.run(missing)[0]
        if why:
            pytest.skip(why)
        alone.run(several)
