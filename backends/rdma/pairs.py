"""Queue pairs of a device: what is made once, before compiled code posts and polls.

pyverbs opens the device. It does not give away the addresses of queue pairs and completion queues, and registers memory at its
own address only, so these are made by libibverbs itself.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.backends.rdma import layout
from xvcomm.backends.rdma.devices import Device, describe, pyverbs
from xvcomm.backends.rdma.library import (
    address_of,
    check,
    checked,
    keep_registered_memory_over_forks,
    libibverbs,
    reason,
)
from xvcomm.backends.rdma.queues import CompletionQueue, PostedQueue
from xvcomm.backends.rdma.regions import Region, with_optional
from xvcomm.errors import BackendUnavailable, ResourceError

_RESET, _INIT, _READY_TO_RECEIVE, _READY_TO_SEND, _ERROR = 0, 1, 2, 3, 6
"""enum ibv_qp_state."""
_STATE, _ACCESS, _PKEY, _PORT, _ADDRESS, _MTU = 1 << 0, 1 << 3, 1 << 4, 1 << 5, 1 << 7, 1 << 8
_TIMEOUT, _RETRIES, _RNR_RETRIES, _RECEIVE_PSN, _READS = 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13
_RNR_TIMER, _SEND_PSN, _READS_HERE, _NUMBER = 1 << 15, 1 << 16, 1 << 17, 1 << 20
"""enum ibv_qp_attr_mask."""
_RELIABLE = 2
"""IBV_QPT_RC."""
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
"""enum ibv_access_flags."""
RELAXED_ORDERING = 1 << 20
"""IBV_ACCESS_RELAXED_ORDERING, which libibverbs leaves out where the kernel does not know it."""
_HOPS = 64
_FOR_EVER = 7
"""Of rnr_retry."""


def _access(readable: bool) -> int:
    """Access flags of memory and queue pairs: writes by this device and by the other ends; reads by these if `readable`."""
    return LOCAL_WRITE | REMOTE_WRITE | (REMOTE_READ if readable else 0)


@dataclass(frozen=True, slots=True)
class Path:
    """How a queue pair sends, and how long it tries.

    Attributes:
        port: of the device.
        gid_index: of this end's GID in the port's table.
        mtu: payload bytes of a packet, at most what both ports have.
        timeout: the device waits 4.096 us * 2**timeout for an answer, and then repeats,
        retries: so many times, at most 6: some devices repeat for ever with 7.
        traffic_class, service_level: as the fabric's operator defines them.
        partition: where its key is in the port's table.
        grh: whether packets in an InfiniBand subnet have a GRH, too; those of Ethernet always have one.
    """

    port: int
    gid_index: int
    mtu: int = 1024
    timeout: int = 14
    retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    partition: int = 0
    grh: bool = False


@dataclass(frozen=True, slots=True)
class Remote:
    """The queue pair at the other end.

    Attributes:
        number: its qp_num.
        gid: of its port, 16 bytes.
        lid: by which packets find its port in an InfiniBand subnet, or the way to it; 0 on Ethernet, where they do by the GID.
    """

    number: int
    gid: bytes
    lid: int = 0


class MemoryRegion:
    """Registered memory; pyverbs' classes register it at its own address or at 0 only.

    Attributes:
        lkey, rkey: see `abc.cards.Keys`.
    """

    def __init__(self, domain: Domain, made: int) -> None:
        """`made`: address of the structure."""
        self._device, self._address = domain.name, made
        layout.check_fields("a region", made, layout.REGION, context=domain.context, pd=domain.domain)
        record = layout.at(made, layout.REGION)
        self.lkey, self.rkey = int(record["lkey"]), int(record["rkey"])

    def close(self) -> None:
        """Register it no more. Idempotent."""
        made, self._address = self._address, 0
        if made:
            check("give a region back", self._device, libibverbs().ibv_dereg_mr(made))


class Domain:
    """An open device with a protection domain: memory and queue pairs that belong together.

    Attributes:
        name: of the device.
        relaxed: access flag of memory that is written to in any order, or 0.
    """

    relaxed = RELAXED_ORDERING

    def __init__(self, name: str) -> None:
        """Open a device.

        Raises:
            BackendUnavailable: pyverbs is missing, or libibverbs is not laid out as `layout` says.
            ResourceError: there is no such device, this user may not open it, or forks would not be safe.
        """
        device, domain = pyverbs("device"), pyverbs("pd")
        keep_registered_memory_over_forks()
        self.name = name
        self._held: list[Any] = []
        try:
            self._context = device.Context(name=name)
            self._domain = domain.PD(self._context)
        except pyverbs("pyverbs_error").PyverbsError as error:
            raise ResourceError(f"{name} cannot be opened: {error}") from error
        self.domain = int(self._domain.pd)
        self.context = int(layout.at(self.domain, layout.PROTECTION_DOMAIN)["context"])
        try:
            layout.check_context(self.context, name, self._context.num_comp_vectors)
            device_address = int(layout.at(self.context, layout.CONTEXT)["device"])
            if libibverbs().ibv_get_device_name(device_address) != name.encode():
                raise layout.refused(f"the context of {name} does not begin with its device")
        except BackendUnavailable:
            self.close()
            raise

    def register(
        self, address: int, nbytes: int, *, iova: int = 0, readable: bool = False, ordered: bool = True
    ) -> MemoryRegion:
        """Let the device read memory, and the other ends' devices write to it.

        Args:
            iova: see `abc.cards.Cards.register`.
            readable: whether the other ends may read it, too.
            ordered: whether what is written must come in order; else a completion alone tells that it is there.

        Raises:
            ResourceError: the device or a limit refuses.
        """

        def made(access: int) -> MemoryRegion:
            region = libibverbs().ibv_reg_mr_iova2(self.domain, address, nbytes, iova or address, access)
            if not region:
                raise ResourceError(f"{self.name} does not register {nbytes} bytes: {reason(ctypes.get_errno())}")
            return MemoryRegion(self, region)

        return self._hold(made, _access(readable), ordered=ordered)

    def register_dma_buf(self, descriptor: int, address: int, nbytes: int, *, ordered: bool = True) -> MemoryRegion:
        """Let the device and the other ends' devices read and write a GPU's memory, of which the driver has given a dma-buf.

        Args:
            ordered: see `register`.

        Raises:
            ResourceError: the device, its driver or the kernel refuses.
        """

        def made(access: int) -> MemoryRegion:
            region = libibverbs().ibv_reg_dmabuf_mr(self.domain, 0, nbytes, address, descriptor, access)
            return MemoryRegion(self, checked(f"region of a dma-buf of {nbytes} bytes", self.name, region))

        return self._hold(made, _access(readable=True), ordered=ordered)

    def _hold(self, register: Callable[[int], Region], access: int, *, ordered: bool) -> Region:
        region, relaxed = with_optional(register, access, 0 if ordered else self.relaxed)
        if not ordered:
            self.relaxed = relaxed  # what was refused once is not tried again
        self._held.append(region)
        return region

    def release(self, region: Any) -> bool:
        """Register memory no more; whether the device touches it no more. Idempotent, also after `close`."""
        if region in self._held:
            self._held.remove(region)
            try:
                region.close()
            except (pyverbs("pyverbs_error").PyverbsError, ResourceError):  # most often the device was removed
                return False
        return True

    @property
    def descriptors(self) -> list[int]:
        """Those that keep the device open."""
        opened = layout.at(self.context, layout.CONTEXT)
        return [int(opened["cmd_fd"]), int(opened["async_fd"])]

    def ask(self) -> Device:
        """Its ports and GIDs as they are now.

        Raises:
            ResourceError: it does not answer.
        """
        try:
            return describe(self.name, self._context)
        except pyverbs("pyverbs_error").PyverbsError as error:
            raise ResourceError(f"{self.name} does not tell its ports: {error}") from error

    def close(self) -> None:
        """Close the device, with the regions; its queue pairs and completion queues must be closed before."""
        for part in (*self._held, self._domain, self._context):
            with contextlib.suppress(pyverbs("pyverbs_error").PyverbsError, ResourceError):  # it was removed
                part.close()


class PolledQueue(CompletionQueue):
    """A completion queue of a device, with its channel."""

    def __init__(self, domain: Domain, entries: int) -> None:
        """Make one.

        Args:
            domain: of the device.
            entries: at least the depths and receives of all its queue pairs together, and one more for each: when they fail, each
                request and each receive has a completion.

        Raises:
            ResourceError: the device gives none.
        """
        library, self._domain = libibverbs(), domain
        self._channel = checked("completion channel", domain.name, library.ibv_create_comp_channel(domain.context))
        try:
            made = library.ibv_create_cq(domain.context, entries, None, self._channel, 0)
            self._queue = checked(f"completion queue of {entries}", domain.name, made)
        except ResourceError:
            library.ibv_destroy_comp_channel(self._channel)
            raise
        layout.check_fields(
            "a completion queue", self._queue, layout.COMPLETION_QUEUE, context=domain.context, channel=self._channel
        )
        get, ack = (address_of(getattr(library, f"ibv_{name}")) for name in ("get_cq_event", "ack_cq_events"))
        super().__init__(self._queue, get, ack)

    def close(self) -> None:
        """Give it back; its queue pairs must be closed before."""
        check("give a completion queue back", self._domain.name, libibverbs().ibv_destroy_cq(self._queue))
        check("give a channel back", self._domain.name, libibverbs().ibv_destroy_comp_channel(self._channel))


class ReliableQueue(PostedQueue):
    """A reliable queue pair (RC) that sends, and is sent and written to by the one that it is connected to.

    Attributes:
        number: by which the other end knows it.
    """

    def __init__(
        self, domain: Domain, completions: PolledQueue, depth: int, inline: int, receives: int = 1, *, readable: bool = False
    ) -> None:  # fmt: skip
        """Make one, not connected.

        Args:
            domain: whose memory it sends.
            completions: where its completions go.
            depth: most requests that may be posted and not ended.
            inline: most bytes of `wire.verbs.write_inline` and `send_inline`.
            receives: most that may be posted and not received.
            readable: whether the other end may read memory.

        Raises:
            ResourceError: the device gives none of this size.
        """
        self._domain, self._completions = domain, completions
        self._access = _access(readable)
        queue = completions.record.queue
        wanted = np.zeros(1, layout.PAIR_INIT)
        wanted["send_cq"] = wanted["recv_cq"] = queue
        wanted["qp_type"] = _RELIABLE
        capacity = wanted["capacity"]
        capacity["send_wr"], capacity["recv_wr"], capacity["send_sge"], capacity["recv_sge"] = depth + 1, receives, 1, 1
        capacity["inline_data"] = inline
        made = libibverbs().ibv_create_qp(domain.domain, wanted.ctypes.data)
        what = f"queue pair of {depth} requests with {inline} bytes inline and {receives} receives"
        self._pair = checked(what, domain.name, made)
        layout.check_fields(
            "a queue pair", self._pair, layout.QUEUE_PAIR, context=domain.context, pd=domain.domain, send_cq=queue,
            recv_cq=queue, state=_RESET, qp_type=_RELIABLE,
        )  # fmt: skip
        super().__init__(self._pair, depth)
        self.number = int(self.record.number)
        completions.add(self)

    def prepare(self, port: int, partition: int = 0) -> None:
        """Let receive requests be posted: it belongs to a port and a partition from now on.

        Raises:
            ResourceError: the device refuses.
        """
        wanted = np.zeros(1, layout.PAIR_ATTRIBUTES)
        wanted["port_num"], wanted["access_flags"] = port, self._access
        wanted["pkey_index"] = partition
        self._move(wanted, _INIT, _PKEY | _PORT | _ACCESS)

    def connect(self, path: Path, remote: Remote) -> None:
        """Join it with the queue pair at the other end, which must do the same. Neither may post requests before both have.

        A SEND for which the other end has posted no receive is repeated without end.

        Raises:
            ResourceError: the device refuses: most often a GID or a path that does not fit.
        """
        if int(layout.at(self._pair, layout.QUEUE_PAIR)["state"]) == _RESET:
            self.prepare(path.port, path.partition)
        wanted = np.zeros(1, layout.PAIR_ATTRIBUTES)
        address = wanted["address"]
        address["route"]["gid"] = np.frombuffer(remote.gid, np.uint64)
        address["route"]["sgid_index"], address["route"]["hop_limit"] = path.gid_index, _HOPS
        address["route"]["traffic_class"], address["sl"] = path.traffic_class, path.service_level
        address["lid"], address["is_global"], address["port"] = remote.lid, path.grh or not remote.lid, path.port
        wanted["path_mtu"], wanted["dest_qp_num"] = path.mtu.bit_length() - 8, remote.number
        wanted["max_dest_rd_atomic"], wanted["min_rnr_timer"] = 1, 12
        self._move(wanted, _READY_TO_RECEIVE, _ADDRESS | _MTU | _NUMBER | _RECEIVE_PSN | _READS_HERE | _RNR_TIMER)

        wanted["timeout"], wanted["retry_cnt"] = path.timeout, path.retries
        wanted["rnr_retry"], wanted["max_rd_atomic"] = _FOR_EVER, 1
        self._move(wanted, _READY_TO_SEND, _TIMEOUT | _RETRIES | _RNR_RETRIES | _SEND_PSN | _READS)

    def fail(self) -> None:
        """Let all that is posted end, and nothing arrive from the other end any more. It cannot be connected again."""
        self._move(np.zeros(1, layout.PAIR_ATTRIBUTES), _ERROR, 0)

    def _move(self, wanted: Any, state: int, mask: int) -> None:
        wanted["state"] = state
        number = libibverbs().ibv_modify_qp(self._pair, wanted.ctypes.data, mask | _STATE)
        check(f"take a queue pair to state {state}", self._domain.name, number)

    def close(self) -> None:
        """Give it back."""
        self._completions.remove(self)
        check("give a queue pair back", self._domain.name, libibverbs().ibv_destroy_qp(self._pair))
