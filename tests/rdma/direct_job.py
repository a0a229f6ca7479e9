"""Messages through rings in GPU memory, which the CPU cannot touch, over the fake provider: run by `test_rdma_direct`.

Arguments: the kind of GPU (`rocm` is the stand-in's; both hosts share one of CUDA's), the provider's library, a folder for its
fabrics, which sides have their rings in GPU memory (`both`, `producer`, `consumer`), then pairs of a fault and a delay. Prints
one line for each pair.
"""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fabric import DROP, STATUS
from fake_hosts import HOST, Hosts, carry, close, until

from xvcomm.abc.device import RingStopped
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.errors import ResourceError
from xvcomm.memory.ring import Reason, RingLayout
from xvcomm.types.deadline import Deadline

LAYOUT = RingLayout(2, 4, 64 << 10, wired=True)
SIZES = (1, 8, 700, 4000, 100_000, 0, 65_536, 1_000_003, 3_000_000)
RETRY_EXC_ERR = 12


def break_pair(hosts, fault):
    """Let a queue pair of the consumer, or its READs, fail."""
    pair = next(pair for pair in hosts.cards[1].pairs if not pair.closed)
    if fault == "cut":
        pair.fake.cut()
    else:
        pair.mirror.fault(STATUS, int(pair.mirror.record.posted) + 1, RETRY_EXC_ERR)


def carry_at_once(hosts, count, seed):
    """Carry messages through several rings at the same time: one READ serves all that have arrived."""
    rings = [hosts.rings(layout=LAYOUT) for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        for _ in threads.map(lambda n: carry(hosts, rings[n], SIZES[:6], seed=seed + n), range(count)):
            pass
    for ends in rings:
        close(*ends)


def carry_back(hosts):
    """Carry messages in the other direction, for which both sides' GPUs can be used, whether they can in the first one or not."""
    ends = hosts.rings(1, layout=LAYOUT)
    assert [end.layout.apart for end in ends] == [True, True]
    carry(hosts, ends, SIZES, source=1, seed=7)
    close(*ends)


def refuse(address, nbytes):
    """Register no memory."""
    raise ResourceError("there is no memory left to lock")


def hush(hosts):
    """Let the READs of the consumer's queue pairs never end, of all that it makes."""
    made = hosts.cards[1].pair

    def pair(address):
        found = made(address)
        found.mirror.fault(DROP, 2)
        return found

    hosts.cards[1].pair = pair
    for found in hosts.cards[1].pairs:
        found.mirror.fault(DROP, int(found.mirror.record.posted) + 2)


def lose(hosts, ends):
    """Begin messages that never arrive; what the ranks are told."""
    with ThreadPoolExecutor(1) as thread:
        failing = thread.submit(carry, hosts, ends, SIZES)
        until(lambda: any(hosts.lost))
        for end in ends:
            end.abort(Reason.PEER_LOST.word(1))
        assert isinstance(failing.exception(), RingStopped)
    return (hosts.lost[0] + hosts.lost[1])[0]


def restrict(hosts, ends):
    """Let each rail carry alone: those of RDMA can; while a socket is to, all of RDMA do."""
    network = hosts.networks[0]
    for chosen in hosts.numbers:
        for index in range(2):
            hosts.networks[index].restrict(1 - index, [(HOST, HOST, chosen)])
        before = {rail.number: rail.sent for rail in network.rails()}
        carry(hosts, ends, SIZES, seed=chosen)
        sent = {rail.number: rail.sent - before[rail.number] for rail in network.rails()}
        by_chosen = sent[chosen] if chosen else sum(sent[number] for number in hosts.numbers[1:])
        assert by_chosen > sum(SIZES) and sum(sent.values()) - by_chosen < sum(SIZES) // 20, (chosen, sent)


def open_early(library, shared, gpus, delay):
    """A rank without Device-Direct opens a ring to one with it before any queue pair is up; where the slots lie at both ends."""
    gate = threading.Event()
    with contextlib.ExitStack() as stack:
        hosts = Hosts(stack, library, shared, devices=gpus, each=[{}, {"gpu": gpus[1]}], asynchronous=True, delay=delay)
        real, far = hosts.cards[0].pair, hosts.networks[1]
        hosts.cards[0].pair = lambda address: (gate.wait(), real(address))[1]
        for network in hosts.networks:
            network.enter(1)

        def opened(index):
            deadline = Deadline.after(60)
            return hosts.networks[index].open_ring(
                1 - index, 1, LAYOUT, deadline, group=1, peer=1 - index, producer=index == 0
            )

        producer = opened(0)
        until(lambda: far._halves._offers or far._halves._early)
        gate.set()
        ends = producer, opened(1)
        carry(hosts, ends, SIZES)
        close(*ends)
        return " ".join("GPU" if end.layout.apart else "host" for end in ends)


def case(library, shared, gpus, sides, fault, delay):
    """Carry messages, before, during and after a fault; what there is to say."""
    if fault == "early":
        return open_early(library, shared, gpus, delay)
    each = [{"gpu": gpu} for gpu in gpus]
    each[0]["reads"], each[1]["writes"] = sides != "consumer", sides != "producer"
    with contextlib.ExitStack() as stack:
        hosts = Hosts(stack, library, shared, devices=gpus, each=each, asynchronous=True, delay=delay)
        if gpus[0].capabilities().kind == "cuda":
            from cupy.cuda import driver

            gpus[0].runtime.use(0)
            hosts.cards[0].fabric.use_cuda(driver.ctxGetCurrent())
        ends = producer, consumer = hosts.rings(layout=LAYOUT)
        assert producer.layout.apart == (sides != "consumer")
        assert consumer.layout.apart == (sides != "producer")
        hosts.meet()
        before = hosts.bytes_by_rdma()
        carry(hosts, ends, SIZES, seed=1)
        assert hosts.bytes_by_rdma() - before > sum(SIZES)
        if fault == "memlock":  # of the side whose ring is in host memory
            hosts.cards[sides == "producer"].register = refuse
            return lose(hosts, hosts.rings(layout=LAYOUT))
        if fault == "silent":
            hush(hosts)
            return lose(hosts, ends)
        if fault == "restrict":
            restrict(hosts, ends)
        elif fault == "none":
            carry_at_once(hosts, 3, seed=2)
            carry_back(hosts)
        else:
            carry(hosts, ends, SIZES, seed=2, halfway=lambda: break_pair(hosts, fault))
            hosts.meet()
            carry(hosts, ends, SIZES, seed=3)
        assert hosts.lost == [[], []]
        close(*ends)
    return "all right"


def main():
    """Run all cases."""
    kind, library, folder, sides, *cases = sys.argv[1:]
    gpus = [plugins.backend(kind).device(Config(device_index=index if kind == "rocm" else 0)) for index in range(2)]
    for number, (fault, delay) in enumerate(zip(cases[::2], cases[1::2], strict=True)):
        print(case(Path(library), Path(folder, f"fabric{number}"), gpus, sides, fault, int(delay)), flush=True)


main()
