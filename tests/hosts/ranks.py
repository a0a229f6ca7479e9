"""What a rank of a test between hosts does: `ranks.py ACTION [ARGUMENT]`."""

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import relay
from messages import not_awaited, share  # noqa: F401 - called by name
from sockets import addresses_between_hosts, between_hosts, congestion_of, congestion_of_new, listeners_in_use

import xvcomm
from xvcomm.system import notice
from xvcomm.testing.inside import forget_routes, network


def collectives(comm):
    """An all_reduce of several sizes, and messages both ways."""
    for count in (1, 1000, 1 << 20):
        x = np.full(count, comm.rank + 1.0, np.float32)
        comm.all_reduce(x)
        assert (x == 3).all()
    other = 1 - comm.rank
    sent, received = np.arange(300_000) * (comm.rank + 1), np.zeros(300_000, int)
    comm.sendrecv(sent, other, received, other)
    assert (received == np.arange(300_000) * (other + 1)).all()
    print(f"{len(set(comm.topology.hosts))} hosts")


def cut(comm, end=4):
    """Messages of known contents for so many seconds, or until the test makes a file; it disturbs them after the first line."""
    x = np.zeros(1 << 18, np.int64)
    began, longest = time.monotonic(), 0.0
    number = 0
    go_on = True
    while go_on:
        start = time.monotonic()
        if comm.rank == 0:
            x[:] = number
            comm.send(x, 1, tag=number)
        else:
            comm.recv(x, 0, tag=number)
            assert (x == number).all()
        longest = max(longest, time.monotonic() - start)
        number += 1
        if number == 5:
            print("begun", flush=True)
        over = os.path.exists(end) if str(end).startswith("/") else time.monotonic() - began >= float(end)
        go_on = comm.broadcast_object(not over)
    print(f"{number} {longest:.3f}")


def hang(comm):
    """Rank 0 waits in vain for a message, after the test has cut a link that was in use: its error, and records."""
    x, group = np.zeros(1 << 20), comm.split(0)
    while not all(comm.all_gather_object(len(comm.rails()) == 2)):
        time.sleep(0.01)
    for _ in range(4):
        comm.all_reduce(x)
    records = comm.history()[-4:]
    print("begun", flush=True)
    while not all(comm.all_gather_object(len(comm.rails()) == 1)):
        time.sleep(0.01)
    if comm.rank == 0:
        try:
            group.recv(x, 1, timeout=1)
        except xvcomm.DeadlineExceeded as error:
            print(error)
        print(*(record.describe() for record in (*records, comm.history()[-1])), sep="\n")
    comm.barrier()


def stuck(comm):
    """All links carry nothing from some moment on: the error at the deadline."""
    x = np.zeros(1 << 18)
    comm.all_reduce(x)
    print("begun", flush=True)
    try:
        while True:
            comm.all_reduce(x, timeout=2)
    except xvcomm.DeadlineExceeded as error:
        print(error, flush=True)
        os._exit(0)  # no store can be reached to leave in good order


def await_cut():
    """Wait until all links are cut. The system tells only some time after a link was made that it is up."""
    while not all(links()):
        time.sleep(0.01)
    print("begun", flush=True)
    while any(links()):
        time.sleep(0.01)


def links():
    """Whether each interface to a link is up."""
    return [state.isup for name, state in psutil.net_if_stats().items() if name.startswith("v")]


def forsaken(comm):
    """Rank 0 is out of reach with the store, while ranks wait in pairs: 0 and 1, 2 and 3, which have wires to each other only."""
    x, other = np.zeros(10), comm.rank ^ 1
    comm.sendrecv(x, other, x.copy(), other)
    comm.store.add("ready", 1)
    while comm.store.add("ready", 0) < comm.size:
        time.sleep(0.01)
    await_cut()
    begun = time.monotonic()
    try:
        comm.recv(x, other)
    except xvcomm.PeerLost as error:
        print(f"{time.monotonic() - begun:.1f} {error.peer} {error}")


def survive(comm, times=1):
    """Ranks are lost, so many times: how long it takes to shrink, and the ranks that are left."""
    for _ in range(int(times)):
        comm.all_reduce(np.zeros(10))
        print("begun", flush=True)
        with contextlib.suppress(xvcomm.PeerLost):
            while True:
                comm.all_reduce(np.zeros(1 << 18))
        begun = time.monotonic()
        comm = comm.shrink()
        seconds = time.monotonic() - begun
        assert comm.all_reduce(np.ones(1 << 18))[0] == comm.size
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x = comm.sendrecv(np.full(1 << 18, comm.rank), after, np.zeros(1 << 18, int), before)
        assert (x == before).all()
        with comm.split(0) as group:
            group.barrier()
        print(json.dumps([seconds, comm.job_ranks]), flush=True)
    comm.barrier()
    comm.close()


def regrow(comm, lost):
    """So many ranks are lost, and come back, where this is called in the communicator that they make with the others."""
    everyone = comm.job_ranks
    if not os.environ.get("XVCOMM_REJOIN"):
        comm.all_reduce(np.zeros(10))
        print("begun", flush=True)
        with contextlib.suppress(xvcomm.PeerLost):
            while True:
                comm.all_reduce(np.zeros(1 << 18))
        comm = comm.shrink()
        while comm.broadcast_object(comm.join_requests() if comm.rank == 0 else None, 0) < int(lost):
            time.sleep(0.02)
        begun = time.monotonic()
        comm = comm.grow()
        print(f"{time.monotonic() - begun:.2f} s", flush=True)
    assert comm.job_ranks == everyone
    assert comm.all_reduce(np.ones(1 << 18))[0] == comm.size
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = comm.sendrecv(np.full(1 << 18, comm.rank), after, np.zeros(1 << 18, int), before)
    assert (x == before).all()
    with comm.split(0) as group:
        group.barrier()
    comm.barrier()
    comm.close()


def apart(comm, what):
    """An operation after all links between the hosts were cut, and before there was any connection between the ranks."""
    await_cut()
    calls = {
        "all_reduce": lambda: comm.all_reduce(np.zeros(3)),
        "subgroup": lambda: comm.subgroup(range(comm.size), "all"),
    }
    begun = time.monotonic()
    try:
        calls[what]()
    except xvcomm.XvcommError as error:
        print(f"{time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}")
    begun = time.monotonic()
    comm.close()
    print(f"{time.monotonic() - begun:.1f} s to leave")


def starved(comm, seconds):
    """Rank 1 can open no more files when rank 0 connects for the first time: for so long, or for good."""
    x, kept = np.full(100_000, comm.rank), []
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                kept.append(open(os.devnull))  # noqa: SIM115
    comm.store.add("starved", 1)
    while comm.store.add("starved", 0) < comm.size:
        time.sleep(0.01)
    if comm.rank == 0:
        comm.send(x + 7, 1)
        comm.recv(x, 1)
    else:
        time.sleep(float(seconds or 0))
        if seconds:
            [file.close() for file in kept]
        comm.recv(x, 0)
        comm.send(x, 0)
    assert (x == 7).all()


def die(comm):
    """Rank 1 ends without a word while rank 0 waits for it."""
    x = np.zeros(10)
    comm.all_reduce(x)
    if comm.rank == 1:
        os._exit(0)
    began = time.monotonic()
    try:
        comm.recv(x, 1)
    except xvcomm.PeerLost as error:
        assert time.monotonic() - began < 5, time.monotonic() - began
        print(error)


def busy(comm):
    """Rank 1 holds the interpreter for longer than XVCOMM_PEER_TIMEOUT when rank 0 wants to connect for the first time."""
    x = np.zeros(10)
    if comm.rank == 0:
        comm.recv(x, 1)
    else:
        ctypes.PyDLL(None).sleep(4)
        comm.send(x + 1, 0)


def outlive(comm):
    """Rank 0, which serves the store, is killed while rank 1 waits for rank 2: neither has a wire to rank 0."""
    comm.store.add("ready", 1)
    if comm.rank == 0:
        while comm.store.add("ready", 0) < comm.size:
            time.sleep(0.01)
        with contextlib.suppress(
            ConnectionRefusedError
        ):  # the store listens on the address that it was given, and on no other
            socket.create_connection(("10.77.1.1", 29711))
            raise AssertionError
        print("ready", time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(np.zeros(10), 3 - comm.rank)
    except xvcomm.PeerLost as error:
        print(time.monotonic(), error.peer, error)


def differ(comm):
    """The ranks describe a message differently."""
    try:
        if comm.rank == 0:
            comm.send(np.zeros(4, np.float32), 1, tag=7)
            comm.recv(np.zeros(1), 1)
        else:
            comm.recv(np.zeros(8, np.int16), 0, tag=7)
    except xvcomm.MismatchError as error:
        print(error)


def give_up(comm):
    """The receiver's deadline passes in the middle of a message between arrays: neither array is touched afterwards."""
    x = np.ones(6 << 20, np.int64)
    comm.all_reduce(np.zeros(10))
    began = time.monotonic()
    try:
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0, timeout=0.5)
    except xvcomm.DeadlineExceeded as error:
        x[:] = 7  # a late copy would change these sevens, or send them
        time.sleep(1)
        assert (x == 7).all()
        print(time.monotonic() - began < 10, error)


def listening(comm):
    """The addresses and ports on which a rank listens, the store's among them."""
    comm.all_reduce(np.zeros(10))
    print(json.dumps([c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]))
    comm.barrier()


def congestion(comm):
    """Print TCP's congestion control of the connections between the hosts."""
    print(json.dumps(find_congestion(comm)))
    comm.barrier()


def find_congestion(comm):
    """That of each of them, sorted."""
    comm.all_reduce(np.zeros(10))
    return congestion_of(between_hosts())


def beginnings(comm):
    """Print TCP's congestion control with which connections begin: of the listener, if another rank has used it, and of one that
    this rank makes.
    """
    comm.all_reduce(np.zeros(10))
    print(json.dumps([congestion_of(listeners_in_use()), congestion_of_new()]))
    comm.barrier()


def rails(comm, wanted):
    """The addresses of the connections between the hosts, this side's first, once there are so many; or after a while."""
    end = time.monotonic() + 8
    while True:
        comm.all_reduce(np.zeros(10))
        late = time.monotonic() > end
        if all(comm.all_gather_object(late or len(addresses_between_hosts()) >= int(wanted))):
            break
        time.sleep(0.05)
    time.sleep(1)  # where both sides have connected, one of the two connections is closed
    print(json.dumps(sorted(addresses_between_hosts())))
    comm.barrier()


def redial(comm):
    """Rank 0 loses its only connection again and again, while a second one is looked for in vain."""
    carrier = network(comm).carrier
    x = np.zeros(10)
    for _ in range(8):
        comm.all_reduce(x)
        time.sleep(0.3)
        for index in list(range(len(carrier.rails))) if comm.rank == 0 else ():
            carrier.drop(index)
        comm.all_reduce(x, timeout=1.4)  # less than a connection that is not answered takes


def misled(comm, file):
    """Once a file is there, rank 0 looks for rank 1's first interface at a port where nobody listens."""
    relay.mislead(comm, 1)
    comm.store.add("ready", 1)
    while comm.store.add("ready", 0) < comm.size:
        time.sleep(0.01)
    forget_routes(comm)
    print("ready", flush=True)
    while not Path(file).exists():
        time.sleep(0.01)
    x = np.full(10, comm.rank)
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    else:
        time.sleep(5)  # since its own connection would do
        comm.recv(x, 0)
        comm.send(x + 1, 0)
    assert (x == 1 - comm.rank).all(), x


def idle(comm):
    """CPU seconds of a rank that does nothing for five seconds."""
    comm.all_reduce(np.zeros(10))
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(5)
    print(f"{time.process_time() - before:.3f}")
    comm.barrier()


def told(comm):
    """An all_reduce; and who this rank is, and in what environment."""
    x = np.full(1000, comm.rank + 1.0)
    comm.all_reduce(x)
    assert (x == 3).all()
    shade = importlib.metadata.version("shade") if importlib.util.find_spec("shade") else None
    print(json.dumps([comm.rank, socket.gethostname(), comm.topology.island_of(comm.rank).label, shade]))


def jax():
    """Rank and size from JAX's variables, and an all_reduce of its arrays."""
    import jax
    import jax.numpy as jnp

    number, count = (int(os.environ[name]) for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"))
    jax.distributed.initialize(num_processes=count, process_id=number)
    with xvcomm.init() as comm:
        assert (comm.all_reduce(jnp.full(1000, comm.rank + 1.0)) == 3).all()
        told(comm)
    jax.distributed.shutdown()


def explicit(number):
    """Rank, size and store as arguments."""
    with xvcomm.init(rank=int(number), size=2, store="tcp://10.77.1.1:29711", device="host", timeout=60) as comm:
        told(comm)


def losses(out):
    """Losses of DDP, and of a pipeline, as examples/torch_ddp.py trains, and those of one process."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import torch
    import torch_ddp
    from llama.config import Model

    torch.distributed.init_process_group("xvcomm")
    model, found = Model(2, 16, 2, 2, 24, 16), {}
    for mode in ("ddp", "pp"):
        settings = argparse.Namespace(mode=mode, steps=3, micro_batches=2, sequences=2, seed=0, lr=1e-3, context=16)
        device, replicas = torch.device("cpu"), torch_ddp.layout(mode, 2)[1]
        found[mode] = torch_ddp.train(model, settings, device, None)
        found[f"{mode} alone"] = torch_ddp.train_alone(model, settings, device, replicas)
    torch.distributed.destroy_process_group()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    action = globals()[sys.argv[1]]
    if action in (jax, explicit, losses):  # which join by themselves
        action(*sys.argv[2:])
    else:
        notice.PLACE = "/etc/hosts"  # which the hosts share, and no other job: one of the ranks prints the warnings
        with xvcomm.init() as communicator:
            action(communicator, *sys.argv[2:])
        left = [thread for thread in threading.enumerate() if thread.name.startswith("xvcomm")]
        if "mpi4py.MPI" not in sys.modules:  # whose connections stay until the process ends
            left += psutil.Process().net_connections()
        assert not left, left
