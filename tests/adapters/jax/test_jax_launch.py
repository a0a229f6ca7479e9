"""Programs as users start them: under jax.distributed, exiting without waiting, and with compiled programs from disk."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jaxchecks import ENVIRONMENT

DISTRIBUTED = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
from xvcomm.adapters import jax as xvjax
with xvjax.init() as comm:
    assert (comm.rank, comm.size) == (jax.process_index(), jax.process_count())
    x = jnp.full(4, comm.rank + 1, jnp.float32)
    assert (np.asarray(jax.jit(xvjax.all_reduce)(x)) == 3).all()
    # A mesh over processes: each has one device of it, and calls for itself.
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("d",))
    spread = jax.make_array_from_single_device_arrays((8,), jax.sharding.NamedSharding(mesh, P("d")), [x])
    summed = jax.jit(jax.shard_map(xvjax.all_reduce, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(spread)
    assert (np.asarray(summed.addressable_shards[0].data) == 3).all()
    try:
        xvjax.all_reduce(spread)
    except xvjax_error as error:
        assert "spread over several processes; call it in jax.shard_map" in str(error), error
    else:
        raise AssertionError("an array of several processes was taken")
    xvjax.use(None)
print("joined as", comm.rank)
jax.distributed.shutdown()
""".replace("xvjax_error", "__import__('xvcomm').ArrayError")

ENDS = """
import sys
import jax, jax.numpy as jnp
from xvcomm.adapters import jax as xvjax
comm = xvjax.init()
x = jnp.ones(500_000)
form, other = sys.argv[1], 1 - comm.rank
if form == "default":
    program = jax.jit(lambda x: xvjax.sendrecv(jnp.sin(x), other, x, other))
else:
    program = jax.jit(lambda x: xvjax.sendrecv(jnp.sin(x), other, x, other, token=xvjax.make_token()))
results = [program(x) for _ in range(3)]
print("dispatched")
"""

CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
from xvcomm.adapters import jax as xvjax
with xvjax.init() as comm:
    for op in sys.argv[2:]:
        hits.clear()
        y = jax.jit(lambda x: xvjax.all_reduce(x * 3.5, op))(jnp.full(2, comm.rank + 1, jnp.float32))
        print(np.asarray(y).tolist(), "hits", len(hits) > 0)
"""


def environment(**more: str) -> dict[str, str]:
    root = Path(__file__).resolve().parents[3]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root), "XVCOMM_TIMEOUT": "30", **more}


def run(folder: Path, script: str, *arguments: str) -> str:
    """Run a script on two ranks by `xvcomm run`; returns their output."""
    (folder / "script.py").write_text(script)
    launcher = [sys.executable, "-m", "xvcomm", "run", "-n", "2", "--islands", "a,b", "--"]
    command = [*launcher, "script.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_under_jax_distributed(tmp_path):
    """Ranks are the processes of jax.distributed, and use its service as the store, without configuration."""
    (tmp_path / "script.py").write_text(DISTRIBUTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py", address, "2", str(rank)], cwd=tmp_path, text=True,
            env=environment(XVCOMM_ISLAND="ab"[rank]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], texts
    assert all(f"joined as {rank}" in text for rank, text in enumerate(texts))


@pytest.mark.parametrize("form", ["default", "token"])
def test_exit_without_waiting_for_results(tmp_path, form):
    """Dispatched operations run before the interpreter exits; no rank fails."""
    assert run(tmp_path, ENDS, form).count("dispatched") == 2


def test_compiled_programs_from_disk(tmp_path):
    """Programs compiled by an earlier run perform the same operation here."""
    cache = str(tmp_path / "cache")
    assert run(tmp_path, CACHED, cache, "sum").count("[10.5, 10.5] hits") == 2
    out = run(tmp_path, CACHED, cache, "sum", "max")
    assert out.count("[10.5, 10.5] hits True") == 2 and out.count("[7.0, 7.0] hits") == 2, out
