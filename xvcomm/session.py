"""What one process has once for all its communicators: device, transports, flight recorder, watch over the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xvcomm import registry, trace
from xvcomm.abc.backend import Backend
from xvcomm.abc.device import Device
from xvcomm.abc.store import PrefixStore, Store
from xvcomm.abc.transport import Capabilities, Transport
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.errors import BackendUnavailable
from xvcomm.shm import Segment, sweep
from xvcomm.store.join import join_barrier
from xvcomm.topology import RankInfo
from xvcomm.watch import Watch, start_time

if TYPE_CHECKING:
    from xvcomm.context import Context


class Joining(msgspec.Struct, frozen=True):
    """What a rank posts when it joins."""

    info: RankInfo
    offers: list[Capabilities]


def host_identity(folder: str) -> str:
    """What two processes have in common exactly if they can share memory: the boot and the tmpfs itself."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place = os.stat(folder)
    return f"{boot}/{place.st_dev}/{place.st_ino}"


class Session:
    """A process's part in one job.

    Attributes:
        rank, size: in the whole job.
        infos: every rank's RankInfo, in rank order.
        offers: every rank's transports.
        recorder: this rank's flight recorder.
    """

    def __init__(
        self, store: Store, rank: int, size: int, config: Config, deadline: Deadline, on_close: Callable[[], None]
    ) -> None:
        """Meet all the other ranks; blocks until they are there.

        Raises:
            DeadlineExceeded: names the ranks that are missing.
            BackendUnavailable: this rank's device does not work, with the remedy.
        """
        self.store, self.rank, self.size, self.config = store, rank, size, config
        self._on_close = on_close
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.lost: dict[int, str] = {}
        self._closed = False
        host = host_identity(config.shm_dir)
        self.backend = self._choose_backend(config)
        self.device: Device = self.backend.device(config)
        self.job = config.job or f"{os.getpid()}"
        self.transports = self._open_transports(host)
        mine = Joining(self._describe(host), [t.capabilities() for t in self.transports])
        everybody = join_barrier(PrefixStore("join", store), rank, size, msgspec.msgpack.encode(mine), deadline)
        joined = [msgspec.msgpack.decode(data, type=Joining) for data in everybody]
        self.infos = tuple(j.info for j in joined)
        self.offers = tuple(tuple(j.offers) for j in joined)
        self.neighbours = tuple(i.rank for i in self.infos if i.host == host)
        self._journal = self._open_journal(deadline)
        self._regions = self._cut(self._journal)
        self.recorder = trace.Recorder(self._regions[rank])
        self.recorder.live(trace.Life.RUNNING)
        self._watch = Watch([self.infos[r] for r in self.neighbours if r != rank], self._on_exit)
        atexit.register(self.close)

    @staticmethod
    def _choose_backend(config: Config) -> Backend:
        if config.device is not None:
            return registry.backend(config.device)
        usable = [f for f in registry.backends() if f.usable]
        # A GPU is what the user bought the machine for; host memory is the fallback.
        usable.sort(key=lambda f: f.name == "host")
        return registry.backend(usable[0].name if usable else "host")

    def _open_transports(self, host: str) -> list[Transport]:
        found = [f.load()(self.config, self.job, host) for f in registry.transports() if f.usable]
        if not found:
            raise BackendUnavailable("no transport works here; `xvcomm doctor` says why")
        return found

    def _describe(self, host: str) -> RankInfo:
        able = self.device.capabilities()
        label = self.config.island
        return RankInfo(
            rank=self.rank, host=host, hostname=socket.gethostname(), pid=os.getpid(),
            started=start_time(os.getpid()), device=able.kind, island=label or able.island, rehearsal=label is not None,
        )  # fmt: skip

    def _open_journal(self, deadline: Deadline) -> Segment:
        """The host's flight recorders, in one piece of shared memory made by its lowest rank."""
        first = self.neighbours[0]
        place = PrefixStore(f"journal/{first}", self.store)
        if self.rank != first:
            segment = Segment.attach(self.config.shm_dir, place.get("name", deadline).decode())
        else:
            size = len(self.neighbours) * trace.region_bytes(self.config.trace_records)
            segment = Segment.create(self.config.shm_dir, self.job, size)
            place.set("name", segment.name.encode())
        if place.add("mapped", 1) == len(self.neighbours):
            segment.unlink()
        return segment

    def _cut(self, journal: Segment) -> dict[int, memoryview]:
        size = trace.region_bytes(self.config.trace_records)
        return {r: journal.view[i * size : (i + 1) * size] for i, r in enumerate(self.neighbours)}

    def collective_label(self, rank: int) -> str:
        """The island label of a rank, made distinct where ranks with equal labels cannot join natively."""
        info = self.infos[rank]
        if info.device == "host" and len({i.host for i in self.infos}) > 1:
            return f"{info.island}@{info.hostname}"
        return info.island

    def add(self, context: Context) -> None:
        """Watch over a communicator from now on."""
        with self._lock:
            self._contexts.add(context)
            lost = list(self.lost)
        for rank in lost:
            context.lose(rank)

    def _on_exit(self, rank: int) -> None:
        """A process of this host ended; every communicator that it belonged to stops."""
        sweep(self.config.shm_dir, self.infos[rank].pid)
        with self._lock:
            self.lost[rank] = self.last_words(rank)
            contexts = list(self._contexts)
        for context in contexts:
            context.lose(rank)

    def last_words(self, rank: int) -> str:
        """What a rank of this host did last, for messages."""
        region = self._regions.get(rank)
        if region is None or self._closed:
            return "it runs on another host"
        record = trace.last(region)
        return f"its last operation: {record.describe()}" if record else "it had not called any operation"

    def left(self, rank: int) -> bool:
        """Whether a rank of this host closed its communicators rather than died."""
        region = self._regions.get(rank)
        return region is not None and not self._closed and trace.life(region) is trace.Life.CLOSED

    def close(self) -> None:
        """Leave the job: close every communicator, stop the threads, unmap. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            contexts = list(self._contexts)
        atexit.unregister(self.close)
        with contextlib.suppress(ValueError):
            self.recorder.live(trace.Life.CLOSED)
        for context in contexts:
            context.close()
        self._watch.close()
        for transport in self.transports:
            transport.close()
        self.recorder.close()
        for region in self._regions.values():
            region.release()
        self._journal.unlink()
        self._journal.close()
        self._on_close()


