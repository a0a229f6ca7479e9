"""What a process has once for all its communicators: device, transports, flight recorder, failure detection."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import msgspec

from xvcomm.abc.device import Device
from xvcomm.abc.peer_memory import SupportsPeerMemory
from xvcomm.abc.store import Store
from xvcomm.abc.transport import KEY_BYTES, Membership
from xvcomm.config import Config
from xvcomm.engine.session import equipment, joining, plugins
from xvcomm.engine.session.attaching import share_journal
from xvcomm.engine.session.carried import with_ways
from xvcomm.engine.session.elsewhere import Departure, Elsewhere, Stop
from xvcomm.engine.session.explaining import Explaining
from xvcomm.engine.session.grown_job import GrownJob, part
from xvcomm.engine.session.join_requests import JoinRequests
from xvcomm.engine.session.joining import Joining, host_identity
from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.liveness import Liveness
from xvcomm.engine.session.peer_rings import PeerRings
from xvcomm.engine.session.presence import Presence
from xvcomm.engine.session.reach import Reach
from xvcomm.engine.session.recorders import Recorders
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.engine.session.rings import Member
from xvcomm.engine.session.succession import Succession, spare_ports
from xvcomm.engine.session.supervision import Supervision
from xvcomm.engine.session.watchdog import Rounds, Watchdog
from xvcomm.errors import DeadlineExceeded, PeerLost, XvcommError
from xvcomm.rendezvous.store.failure import cause
from xvcomm.rendezvous.store.guarded import GuardedStore
from xvcomm.rendezvous.store.join import ended, join_barrier, refuse
from xvcomm.rendezvous.store.moving import MovingStore
from xvcomm.system import forking, limits
from xvcomm.trace.format import Life, Record
from xvcomm.types.deadline import Deadline


class Session:
    """A process's membership in one job.

    Attributes:
        infos: every rank's RankInfo, in rank order.
        journal: the flight recorders of this host's ranks.
        recorders: those of all ranks.
        explaining: says why the job hangs.
        store: of the job, whichever process serves it.
        succession: finds it again if that process ends.
        liveness: knows which ranks are lost or have left.
        peer_rings: exports and imports of GPU memory for rings.
        neighbours: the ranks of this host, including this one.
        name: of the job, equal on all ranks.
        numbers: of all ranks, as programs know them; see `GrownJob`.
        supervision: its communicators.
        join_requests: of processes that want to join.
        grown: what this job knows of the one that has grown into it; None if there is none.
        at_close: takes a function for `close` to call, before those that it took earlier.
    """

    def __init__(
        self, store: Store, rank: int, size: int, config: Config, deadline: Deadline, on_close: Callable[[], None],
        grown: GrownJob | None = None,
    ) -> None:  # fmt: skip
        """Join the other ranks; blocks until all have joined.

        Args:
            on_close: called once, when everything is closed.

        Raises:
            DeadlineExceeded: names the ranks that are missing.
            BackendUnavailable: this rank's device does not work; with the remedy.
            PeerLost, Aborted: another rank died or failed meanwhile; gives the reason.
        """
        self.store, self.rank, self.size, self.config = MovingStore(store, on_close), rank, size, config
        self._lock = threading.RLock()  # reentrant, because a signal handler may close the session at any point
        self._following = threading.Lock()  # held by the thread that follows the store
        self._elsewhere: Elsewhere | None = None
        self._told = b""  # generation of the store in which this rank has published what others need
        self.journal, self.grown = Journal(), grown
        self.supervision = Supervision(self.journal)
        self._complete = self._closed = False
        self._cleanup = contextlib.ExitStack()
        self.at_close = self._cleanup.callback
        self.job = f"{config.job or 'job'}-{secrets.token_hex(4)}"
        spare = spare_ports(config) if size > 1 else ()
        self.succession = Succession(
            self.store, rank, spare, lambda r: self.liveness.gone(r), lambda r: self.liveness.stricken(r),
            lambda ranks: self.liveness.doubt(ranks),
        )  # fmt: skip
        self._cleanup.callback(self.succession.close)
        self._cleanup.callback(self.store.close)
        self.numbers = tuple(range(size)) if grown is None else grown.numbers
        self.join_requests = JoinRequests(store, config) if grown is None else grown.requests
        self._join = join = part("join", store, grown)
        self._meeting = part("transports", self.store, grown)
        try:
            mine = self._introduce(join)
            everybody = join_barrier(join, rank, size, msgspec.msgpack.encode(mine), deadline)
        except BaseException:
            self.succession.close()
            raise
        self._joined = [joining.decode(data) for data in everybody]
        self.infos, self.name = tuple(j.info for j in self._joined), self._joined[0].job
        self.join_requests.meet(rank, self._joined)
        serving = next((rank for rank, joined in enumerate(self._joined) if joined.serves), None)
        self.succession.open([j.successor for j in self._joined], serving)
        self.neighbours = tuple(i.rank for i in self.infos if i.host == mine.info.host)
        self._reach = Reach(self.transports, self._joined, rank)
        self.recorders = Recorders(
            self.journal, self._joined, rank, self.neighbours, self._reach, lambda r: self.supervision.lost.get(r, "")
        )
        self.explaining = Explaining(
            self.recorders, config, self.name, rank, size, self.history, self.supervision.calls_native
        )
        self._cleanup.callback(self.explaining.close)
        self.liveness = Liveness(
            self._joined, rank, self.neighbours, config, self._presence, self.journal, self.supervision, self._reach,
            self.recorders, self.explaining, self.succession,
        )  # fmt: skip
        shared = self.device if isinstance(self.device, SupportsPeerMemory) else None
        self.peer_rings = PeerRings(shared, self.liveness.gone)
        atexit.register(self._at_exit)
        forking.register(self)
        self._start(deadline)

    def _introduce(self, join: Store) -> Joining:
        """Determine this rank's device and transports; if that fails, tell the others not to wait for it."""
        config = self.config
        try:
            with limits.told("join the job"):
                host = host_identity(config.shm_dir, config.host)
                self.backend = equipment.choose_backend(config)
                self.device: Device = self.backend.device(config)
                self._presence = Presence.take(config.shm_dir)
                self.transports = equipment.open_transports(config, host)
        except (XvcommError, OSError) as error:
            refuse(join, self.rank, error)
            raise
        memory = self.device.peer_memory() if isinstance(self.device, SupportsPeerMemory) else None
        return Joining(
            equipment.describe(config, self.device, self.rank, host), [t.capabilities() for t in self.transports], self.job,
            os.readlink("/proc/self/ns/pid"), self._presence.byte, memory, self.store.served_here, self.succession.place,
            RingSizes.of(config), secrets.token_bytes(KEY_BYTES) if self.rank == 0 else b"",
        )  # fmt: skip

    def _start(self, deadline: Deadline) -> None:
        self._place = self.guarded(f"journal/{self.neighbours[0]}", self.liveness.check_neighbours)
        following = self.guarded("comm/0", self.liveness.check_neighbours)
        leaving = self._cleanup.enter_context(contextlib.ExitStack())  # entered first, so after what was sent has come
        for transport in self.transports:
            self._cleanup.callback(transport.close)
        self._cleanup.callback(self._flush_elsewhere)  # before transports tell that this rank leaves
        try:
            with self.telling(following), limits.told("join the job"):
                self._join_transports()
                self._listen_elsewhere(deadline)
                leaving.callback(self._leave_elsewhere)
                watchdog = Watchdog(self.liveness.watched(), self._presence, self.liveness.note_exit, self._look)
                with contextlib.ExitStack() as failing:
                    failing.callback(watchdog.close)
                    places = [self._joined[r].processes for r in self.neighbours]
                    journal = self._cleanup.enter_context(share_journal(self, self._place, places, deadline))
                    self._unname_journal = journal.unlink
                    for transport in self.transports:
                        self._cleanup.callback(transport.expose, 0)
                        transport.expose(self.journal.recorder.handle)
                    self._cleanup.callback(self.liveness.sweep_if_last, self.neighbours, (self.rank,))
                    self._cleanup.callback(self.explaining.close)  # what it reads is closed later
                    self._cleanup.callback(watchdog.close)
                    if self.device.capabilities().asynchronous:
                        look = partial(self.supervision.watch_over, lambda context: context.tracker.look())
                        self._cleanup.callback(Rounds(look).close)
                    failing.pop_all()
        except BaseException as error:
            self.give_up(error)
            raise
        self._cleanup.callback(self.peer_rings.linger)

    def ready(self) -> None:
        """Wait until ranks of other hosts would hear of the end of this process: before it tells any that it has started.

        Raises:
            StoreError, DeadlineExceeded: what the store tells of other hosts cannot be followed.
        """
        if self._elsewhere is not None:
            self._elsewhere.ready()

    def ended(self) -> Sequence[int]:
        """A rank that has ended before it was `ready`, as far as the store knows and this rank still starts."""
        return () if self._complete else ended(self._join)

    def complete(self) -> None:
        """All ranks of the job have started: end what this one does beside its start."""
        self._complete = True
        self._unname_journal()
        if self._elsewhere is not None:
            self._elsewhere.meet()

    def _listen_elsewhere(self, deadline: Deadline) -> None:
        """Begin to follow what the store tells of other hosts, as far as any of their ranks are left."""
        others = [r for r in range(self.size) if r not in self.neighbours and not self.liveness.gone(r)]
        server = self.succession.server
        others.sort(key=lambda rank: rank != server)
        follows = None if not others else Elsewhere(
            self.store, self.rank, self.neighbours, server, others,
            self.config.peer_timeout, deadline, self._reach.transport, self.supervision.lost, self.liveness.lose,
            self.supervision.hear,
        )  # fmt: skip
        before, self._elsewhere = self._elsewhere, follows
        if before is not None and follows is not None:
            for stop in before.unposted():
                follows.post(stop)

    def follow_store(self, deadline: Deadline) -> None:
        """Use the successor of the job's store, if the process that served it has ended; see `Succession.follow`."""
        if not self._following.acquire(timeout=deadline.sooner(threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(
                "another thread of this process has not reached the job's store in time; a larger timeout lets this one wait",
                rank=self.rank,
            )
        try:
            before = self._elsewhere
            self.succession.follow(deadline, self._abandon_elsewhere)
            if self._told != self.succession.generation:
                if before is not None:
                    before.abandon(served=True)  # an exception may have come before it was ready
                    before.join()
                self._begin_again(deadline)
        finally:
            self._following.release()

    def _begin_again(self, deadline: Deadline) -> None:
        """Publish in the present store what others need, and follow what it tells of other hosts."""
        for transport in self.transports:
            transport.announce()
        self._listen_elsewhere(deadline)
        if self._elsewhere is not None:
            self._elsewhere.ready()
            self._elsewhere.meet()
        self._told = self.succession.generation

    def _abandon_elsewhere(self) -> None:
        self._told = b""  # also if the store is the same one, over another connection
        self.join_requests.close()
        if self._elsewhere is not None:
            self._elsewhere.abandon(served=self.journal.left(self.succession.suspect))

    def _flush_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.flush()

    def _leave_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()

    def _join_transports(self) -> None:
        """Let the transports begin that this rank needs for any other."""
        needed = {self._reach.scheme(r) for r in range(self.size) if r != self.rank}
        membership = Membership(
            self.rank, self.size, len(self.neighbours), self._meeting, self._joined[0].key, self.liveness.lose,
            self.liveness.note_left, self.device, plugins.cards,
        )  # fmt: skip
        for transport in self.transports:
            if transport.capabilities().scheme in needed:
                transport.join(membership)

    def give_up(self, error: BaseException) -> None:
        """Leave a job whose start failed, and remove the shared memory that no rank will map any more."""
        with contextlib.closing(self):  # also where no file can be opened, in which case names of shared memory stay
            with contextlib.suppress(XvcommError):  # before the names are removed, so that the others report this error
                self._place.fail(cause(error, self.rank, self.infos[self.rank].hostname))
            with contextlib.suppress(OSError):
                self.liveness.sweep_lost()

    def guarded(self, prefix: str, check: Callable[[], None]) -> GuardedStore:
        """A part of the job's store in which waits end when `check` raises, or the rank that serves the store dies."""
        return GuardedStore(prefix, self.store, check, self._check_server)

    def check_store(self) -> None:
        """Raise PeerLost if ranks that shrink a communicator move to another store."""
        if self.succession.due():
            self._check_server()

    def _check_server(self) -> None:
        """Raise PeerLost if the rank is gone that serves the store; called when the store cannot be reached."""
        if self.liveness.gone(self.succession.suspect):
            text = f"{self.server_lost()}; go on without it by shrink(), or restart the job"
            raise PeerLost(text, rank=self.rank, peer=self.succession.suspect)

    def server_lost(self) -> str:
        """Error text for the loss of the rank that serves the store."""
        rank = self.succession.suspect
        where, how = self.infos[rank].hostname, "left" if self.journal.left(rank) else "was lost"
        return (
            f"rank {rank} of the job on {where}, which served the job's store, {how}; {self.liveness.last_words(rank)}"
        )

    @contextlib.contextmanager
    def telling(self, place: GuardedStore) -> Iterator[None]:
        """Report an error of the block to the other ranks that wait in this part of the store."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(XvcommError):
                place.fail(cause(error, self.rank, self.infos[self.rank].hostname))
            raise

    def member(self, rank: int) -> Member:
        """The properties of a rank that determine its rings."""
        joined, label = self._joined[rank], equipment.collective_label(self.infos, rank)
        return Member(rank, joined.offers, joined.info.device, label, joined.memory, joined.rings)

    def history(self) -> list[Record]:
        """The flight recorder's records; those of open communicators tell their way, and what connections have carried."""
        return with_ways(self.journal.recorder.history(), self.supervision.contexts())

    def announce(self, news: Stop | Departure, ranks: Collection[int]) -> None:
        """Tell those of a communicator's ranks that are on other hosts what became of it on this one, if the store can."""
        if self._elsewhere is not None and not set(self.neighbours).issuperset(ranks):
            self._elsewhere.post(news)

    def hears(self, rank: int) -> bool:
        """Whether announcements of a rank come to this one."""
        return self._elsewhere is not None and self._elsewhere.tells and rank not in self.neighbours

    def _look(self) -> None:
        self.succession.look()
        self.liveness.look()
        if self._elsewhere is not None:
            self._elsewhere.look()
        self.explaining.look()
        self.supervision.watch_over(lambda context: context.look())
        self.supervision.note_stages()

    def after_fork(self) -> None:
        """Close every communicator in a forked child, without notifying the other ranks."""
        self._closed = True
        self._lock = threading.RLock()  # the copied lock may be held by a thread that the child does not have
        self._cleanup.pop_all()
        self.supervision.after_fork()

    def _at_exit(self) -> None:
        self.explaining.note_end(getattr(sys, "last_value", None))
        self.close()

    def hand_over(self) -> Callable[[], None]:
        """Leave the job that has grown into another one, which uses the same store: returns what closes that."""
        self.join_requests.close()
        with contextlib.closing(self):
            return self.store.hand_over()

    def close(self) -> None:
        """Leave the job: close every communicator, stop the threads, unmap memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        with self._cleanup:  # It runs every step, even if an interrupt ends one of them.
            if self.journal:
                job, leave = (self.name, self.rank, self.size), self.join_requests.leave
                self._cleanup.callback(leave, job, self.supervision.lost, self.journal.left)
                # After the communicators are closed: until then others may wait for operations that this rank has begun.
                self._cleanup.callback(self.journal.recorder.live, Life.CLOSED)
            for context in self.supervision.contexts():
                self._cleanup.callback(context.lifecycle.close)
