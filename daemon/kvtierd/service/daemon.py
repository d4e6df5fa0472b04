"""The daemon: its parts, its start and its stop, and disk tiers that fail while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

import grpc
from google.protobuf.message import Message

from kvtierd.config import LIVE, Config
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, Tier
from kvtierd.event_log import LEAST_WAITING_BYTES, EventLog
from kvtierd.mover.engine import Engine
from kvtierd.notify import Notifier, PassedFd
from kvtierd.rights import Rights
from kvtierd.service import wire
from kvtierd.service.assembly import Stores, described, open_devices, open_gpus
from kvtierd.service.attach import AttachServer, DaemonIdentity
from kvtierd.service.budgets import CACHES, RememberedSlots, require_possible
from kvtierd.service.cache import CacheSettings
from kvtierd.service.call_counts import CallCounts
from kvtierd.service.calls import Access, Dispatcher, OpenCalls, Pace
from kvtierd.service.catalog import Catalog
from kvtierd.service.connections import Connections
from kvtierd.service.devices import Devices
from kvtierd.service.errors import Translator
from kvtierd.service.failing import FailingDisks, LostGpus
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.hints import Hints
from kvtierd.service.hub import CacheHeader, EventHub
from kvtierd.service.recovery import Keeper, Roll, RollEntry, open_roll
from kvtierd.service.remote.telling import Generations
from kvtierd.service.remote.tier import RemoteTier, opened_store
from kvtierd.service.server import Health, RpcServer, RuntimeDir
from kvtierd.service.servicers.admin import AdminService
from kvtierd.service.servicers.blocks import BlocksService, Caps
from kvtierd.service.servicers.caches import CachesService
from kvtierd.service.servicers.events import EventsService
from kvtierd.service.servicers.sessions import RemoteSessions
from kvtierd.service.servicers.transfer import TransferService
from kvtierd.service.sessions import Capacity, SessionRegistry
from kvtierd.service.turns import Turns
from kvtierd.service.unauthenticated import UnauthenticatedCalls
from kvtierd.state import EVENT_LOG, StateDir
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.superblock import exposure
from kvtierd.tiers.mapped import Chaos
from kvtierd.tiers.remote.base import RemoteStore

if TYPE_CHECKING:
    from kvtierd.fleet.peers import Fleet
    from kvtierd.service.metrics import Metrics
    from kvtierd.service.spans import Spans


FORGOTTEN: Final = "forgotten"
"""The directory below the state directory that tells when caches forgot their blocks."""

WATCHES_END_S: Final = 2.0
"""Seconds that watchers get to read their last events after everything else has stopped."""

FAREWELL_S: Final = 0.5
"""Least seconds that answered clients get to acknowledge the end of their connections."""

LOG_ENDS_S: Final = 5.0
"""Seconds that the event log gets for the last events. Events that are late are missing from the log."""

SPARE_CONNECTIONS: Final = 64
"""Connections on the attach socket beyond the capacity for sessions, so that a refused client receives the reason. A
uid may have half of them, so that its connections without a session do not lock out other clients."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Directories:
    """The directories that this daemon holds alone while it lives."""

    state: StateDir
    run: RuntimeDir
    disk: DiskRoot | None
    remembered: RememberedSlots
    forgotten: Forgotten
    log: EventLog | None

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens all directories or none. Raises the errors of ``kvtierd.tiers.base``."""
        with ExitStack() as opened:
            state = StateDir.open(config.state_dir)
            opened.callback(state.close, None)
            run = RuntimeDir.open(config.runtime_dir)
            opened.callback(run.close)
            disk = None
            if Tier.DISK in config.tiers:
                disk = DiskRoot.open(config.disk_path, durable=config.sync == "commit")
                opened.callback(disk.close)
            remembered = RememberedSlots(config.state_dir / CACHES)
            forgotten = Forgotten(config.state_dir / FORGOTTEN)
            log = None
            if config.event_log_bytes:
                waiting_bytes = max(config.event_ring_bytes, LEAST_WAITING_BYTES)
                log = EventLog.open(config.state_dir / EVENT_LOG, config.event_log_bytes, waiting_bytes)
                opened.callback(log.close)
                state.begin(*log.known)
                log.start(state.identity.epoch_first)
            else:
                state.begin()
            opened.pop_all()
        return cls(state, run, disk, remembered, forgotten, log)


class Daemon:
    """Serves from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        config: Config,
        directories: _Directories,
        keeper: Keeper,
        roll: Roll | None,
        devices: Devices,
        store: RemoteStore | None,
        spans: Spans | None,
    ) -> None:
        life = directories.state.identity
        self._config = config
        self.config_problems: tuple[str, ...] = ()
        """Why the last reload of the configuration did not take effect, or not for every key."""
        self._exposed: Sequence[str] = ()
        """Problems of directories that other users may write to."""
        self._directories: Final = directories
        self._phase = "starting"
        """starting, serving or stopping."""
        self._sequencer: Final = EventSequencer(life.last)
        headers: dict[CacheId, CacheHeader] = {}
        self._log: Final = directories.log
        self._hub: Final = EventHub(
            life.epoch, life.last, life.epoch_first, headers, config.event_ring_bytes, self._log
        )
        self._metrics: Metrics | None = None
        self._engine: Final = Engine(
            asyncio.get_running_loop(),
            self._hub,
            self._sequencer,
            gpus=len(devices.gpus),
            debug_checks=config.debug_checks,
        )
        stores = Stores(
            devices,
            directories.remembered,
            directories.disk,
            None if config.chaos_seed is None else Chaos(config.chaos_seed),
            config.policy,
            CacheSettings(config.write_policy, config.eviction, config.event_hash, config.keep_tokens),
            directories.forgotten,
            keeper,
        )
        self._keeper: Final = keeper
        self._roll: Final = roll
        self._devices: Final = devices
        self._catalog: Final = Catalog(self._engine, self._sequencer, stores, life, headers)
        self._sessions: Final = SessionRegistry(self._engine, _capacity(config), roll)
        self._failing: Final = FailingDisks(self._catalog, self._engine, config.tier_grace_seconds)
        self._lost_gpus: Final = LostGpus(self._catalog, devices, keeper)
        self._identity: Final = DaemonIdentity(life.epoch, life.boot, os.getpid(), life.history)
        self._translator: Final = Translator(self._sessions.owner_of)
        self._access: Final = Access(Rights(config.allow, os.getuid()), self._catalog)
        self._health: Final = Health(self._engine, self._catalog, self._sessions, self._problems)
        self.fleet: Final = self._made_fleet()
        self._remote_tier: Final = self._made_remote(store)
        """None if there is neither a store nor a peer."""
        self._events: Final = EventsService(self._hub, self._engine, self._catalog, self._access)
        self._calls: Final = OpenCalls()
        self._spans: Final = spans
        if spans is not None:
            spans.watch(self._engine, self._catalog)
        self._dispatcher: Final = Dispatcher(
            self._sessions,
            self._access,
            self._translator,
            self._calls,
            self._names_lease,
            spans or CallCounts(),
            Turns(),
        )
        self._attach: Final = AttachServer(
            self._sessions, self._catalog, self._identity, self._access, self._dispatcher, _connection_capacity(config)
        )
        grace_s = config.tcp_grace_seconds
        unauthenticated = UnauthenticatedCalls(self._translator)
        self._tcp_sessions: Final = RemoteSessions(
            self._sessions, self._access, self._identity, grace_s, self._translator, unauthenticated
        )
        self._rpc: Final = RpcServer(self._handlers(), unauthenticated)
        self._tcp: str | None = None
        self._connections: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Config, notifier: Notifier | None = None, passed: Sequence[PassedFd] = ()) -> Self:
        """Returns a serving daemon. Calls to caches that are already loaded are answered during the start.

        ``notifier``: to the service manager. ``passed``: descriptors that the manager kept, owned by the daemon from
        now on. Raises the errors of ``kvtierd.tiers.base`` if a directory or an address is unavailable, a device does
        not exist, or a tier is larger than the machine. The last two are checked before anything is changed.
        """
        if warning := await asyncio.to_thread(require_possible, config):
            _log.warning("%s", warning)
        store = None if config.remote is None else await opened_store(config.remote)
        spans = None if config.traces is None else _made_spans(config.traces)
        keeper = Keeper(notifier or Notifier(None), passed)
        known = (await asyncio.to_thread(RememberedSlots, config.state_dir / CACHES)).gpus
        gpus = await asyncio.to_thread(open_gpus, config, known)
        directories = await asyncio.to_thread(_Directories.open, config)
        roll, entries = await asyncio.to_thread(open_roll, keeper)
        devices = await asyncio.to_thread(open_devices, config, gpus, keeper, directories.remembered)
        daemon = cls(config, directories, keeper, roll, devices, store, spans)
        try:
            await daemon._serve(entries)
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    def _problems(self) -> Iterator[str]:
        yield from self._devices.problems()
        if self._log is not None and (failing := self._log.status().failing) is not None:
            yield f"events are not logged: {failing}"
        remote = None if self._remote_tier is None else self._remote_tier.problem
        yield from filter(None, (remote, self._attach.problem, *self._exposed, *self.config_problems))

    async def look_at_directories(self) -> None:
        """Notes the directories that other users may write to."""
        config = self._config
        paths = (config.runtime_dir, config.state_dir, *([config.disk_path] if config.disk_bytes else []))
        self._exposed = await asyncio.to_thread(lambda: [*filter(None, map(exposure, paths))])
        for problem in self._exposed:
            _log.warning("%s", problem)

    async def _serve(self, entries: Sequence[RollEntry]) -> None:
        await self.look_at_directories()
        self._lost_gpus.start()
        plans = await self._catalog.plan_restore(self._sessions.restore(entries))
        run = self._directories.run
        if (tcp := self._config.tcp) is not None:
            self._tcp = replace(tcp, port=self._rpc.listen(tcp)).target
            _log.info("listening on TCP address=%s tls=%s", self._tcp, tcp.tls is not None)
        with run.creating_sockets():
            self._rpc.bind(run.rpc_path)
            listener = run.bind_attach()
        if (address := self._config.metrics_address) is not None:
            self._metrics = self._serving_metrics(*address)
        await self._rpc.start()
        port = None if self._tcp is None else int(self._tcp.rpartition(":")[2])
        connections = Connections(run.rpc_path, port, self._sessions.owners)
        self._connections = asyncio.create_task(connections.run(), name="connections")
        self._attach.start(listener)
        await self._catalog.load(plans)
        self._sessions.settle()
        self._failing.start()
        if self._remote_tier is not None:
            self._remote_tier.start()
        if self.fleet is not None:
            self.fleet.start()
        self._phase = "serving"

    @property
    def address(self) -> str:
        return str(self._directories.run.path)

    @property
    def tcp_address(self) -> str | None:
        """host:port for TCP clients; None without a TCP listener."""
        return self._tcp

    def stalled_s(self) -> float:
        """Seconds that the mover's slowest thread has been in its present call, for a watchdog."""
        return self._engine.stalled_s()

    async def stop(self) -> bool:
        """Stops within the configured time. Returns False if the stop was not clean: threads may then still be in the
        stores, which stay open until the process ends."""
        served, self._phase = self._phase == "serving", "stopping"
        if self._connections is not None:
            self._connections.cancel()
            await asyncio.wait([self._connections])
        await self._rpc.announce_stop()
        await self._attach.stop_accepting()
        if self.fleet is not None:
            await self.fleet.stop()
        await self._lost_gpus.stop()
        probed = await self._failing.stop()
        if self._remote_tier is not None:
            await self._remote_tier.stop()
        clean = await self._engine.shutdown(self._config.shutdown_seconds) and probed
        if self._metrics is not None:  # not before: a probe tells a stop from a crash
            await self._metrics.stop()
        self._dispatcher.stop()
        self._hub.close()
        self._tcp_sessions.close()
        logged = None if self._log is None else asyncio.create_task(self._log.finish(LOG_ENDS_S))
        loop = asyncio.get_running_loop()
        ends = loop.time() + WATCHES_END_S
        await self._calls.answered(WATCHES_END_S)
        await self._rpc.stop(max(FAREWELL_S, ends - loop.time()))
        if self._remote_tier is not None:
            await self._remote_tier.close()
        self._sessions.close()
        await self._attach.hang_up()
        clean = clean and await self._catalog.close()
        if clean:
            if self._roll is not None:
                self._roll.close()
            for gpu in self._devices.gpus:
                await asyncio.to_thread(gpu.close)
        else:
            _log.error("the stop was not clean: moves or copies had to be abandoned")
        if self._log is not None and logged is not None:
            await logged
            self._log.close()
        # A start that failed after a crash has not told watchers of the crash, so the next start must.
        told = served or not self._directories.state.identity.unclean
        self._directories.state.close(self._sequencer.last if clean and told else None)
        self._directories.run.close()
        if self._spans is not None:
            await self._spans.close()
        return clean

    def _handlers(self) -> dict[str, grpc.GenericRpcHandler]:
        config, wait_s = self._config, self._config.wait_seconds
        caps = Caps(self._engine, config.max_reserved_fraction)
        blocks = BlocksService(
            self._engine,
            self._catalog,
            self._sessions,
            self._access,
            self._identity,
            wait_s,
            self._translator.detail,
            caps,
            self._directories.forgotten,
            self._remote_tier,
            Hints(self._engine, self._sessions, self._dispatcher.call_counts.hints),
        )
        servicers = {
            "kvtier.v1.Caches": CachesService(
                self._catalog,
                self._sessions,
                self._access,
                config.tiers,
                self._directories.forgotten,
                self._remote_tier,
            ),
            "kvtier.v1.Blocks": blocks,
            "kvtier.v1.Events": self._events,
            "kvtier.v1.Transfer": TransferService(self._engine, self._catalog, self._access, blocks, wait_s, caps),
            "kvtier.v1.Admin": AdminService(
                self._engine,
                self._catalog,
                self._sessions,
                self._access,
                self._hub,
                self._identity,
                self._health,
                self._events.watching,
                self._log,
                described(self._devices),
                self._remote_tier,
                self.fleet,
            ),
        }
        paces = {"kvtier.v1.Transfer": Pace(config.transfer_idle_seconds)}
        handlers = {name: self._dispatcher.handler(name, each, paces.get(name)) for name, each in servicers.items()}
        return handlers | {RemoteSessions.name: self._tcp_sessions.handler(self._calls)}

    def _serving_metrics(self, host: str, port: int) -> Metrics:
        # A daemon without metrics does not wait for this import at its start.
        from kvtierd.service.metrics import Metrics, Subjects

        subjects = Subjects(
            self._engine,
            self._hub,
            self._catalog,
            self._sessions,
            self._identity,
            self._events.watching,
            lambda: self._health.problems(list(self._catalog)),
            lambda: self._phase,
            self._log,
            self.fleet,
            self._remote_tier,
            self._dispatcher.call_counts,
            self._config.disk_path if self._config.disk_bytes else None,
            self._config.metrics_page,
        )
        return Metrics(host, port, subjects)

    def _made_fleet(self) -> Fleet | None:
        if not self._config.peers:
            return None
        # A daemon without peers does not wait for the client library at its start.
        from kvtierd.fleet.peers import Fleet

        tls = self._config.peer_tls
        files = None if tls is None else (tls.cert, tls.key, tls.client_ca)
        addresses = [peer.address for peer in self._config.peers]
        history = self._identity.history
        return Fleet(addresses, files, lambda: {each.name: each.fingerprint for each in self._catalog}, history)

    def _made_remote(self, store: RemoteStore | None) -> RemoteTier | None:
        peers: dict[str, RemoteStore] = {}
        if self.fleet is not None:
            from kvtierd.fleet.store import PeerStore

            peers = {peer.address: PeerStore(peer) for peer in self.fleet.peers}
        if store is None and not peers:
            return None
        generations: Generations = (lambda name: ()) if self.fleet is None else self.fleet.generations
        return RemoteTier(
            *(self._engine, self._hub, self._catalog, self._config.remote, store, peers, generations),
            self._directories.forgotten,
        )

    def reload(self, fresh: Config) -> None:
        """Takes over the changed keys in :data:`LIVE`. Other changed keys become :attr:`config_problems`."""
        changed = {key for key in Config.model_fields if getattr(fresh, key) != getattr(self._config, key)}
        self.config_problems = tuple(
            f"configuration: {key} has changed; that takes a restart" for key in sorted(changed - LIVE)
        )
        live, refused = ",".join(sorted(changed & LIVE)), ",".join(sorted(changed - LIVE))
        _log.info("configuration reloaded changed=%s refused=%s", live, refused)
        self._config = self._config.model_copy(update={key: getattr(fresh, key) for key in LIVE})
        self._access.rights = Rights(fresh.allow, os.getuid())
        self._events.rights_changed()

    def _names_lease(self, reply: Message) -> bool:
        """Whether a call granted a lease that still lives."""
        leases = wire.granted_leases(reply)
        return any(lease in cache.runtime.manager.leases for cache in self._catalog for lease in leases)


def _made_spans(endpoint: str) -> Spans:
    try:  # a daemon without traces does not wait for this import at its start
        from kvtierd.service.spans import Spans
    except ModuleNotFoundError as missing:
        needs = f"needs pip install '.[otel]' in a clone of kvtier ({missing})"
        raise TierConfigError("traces", endpoint, needs) from missing
    return Spans(endpoint)


def _capacity(config: Config) -> Capacity:
    return Capacity(config.max_sessions, max(1, config.max_sessions // 2))


def _connection_capacity(config: Config) -> Capacity:
    most = _capacity(config)
    of_identity = most.of_identity + SPARE_CONNECTIONS // 2
    return Capacity(most.sessions + SPARE_CONNECTIONS, of_identity)
