"""The parts of a cache: its memory, its stores, and their content of an earlier life.

Making them blocks (it allocates shared memory, makes and reads disk stores), so it runs in a thread, before the engine
knows of the cache. The catalog decides which caches exist.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.abi import attach
from kvtier.abi.control import ArenaIdentity
from kvtier.abi.cuda.errors import CudaError
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import admin_pb2
from kvtierd.config import Config
from kvtierd.config.keys import STAND_IN, DeviceConfig, Share
from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import CacheId, GroupId, Key, SlotId, Tier
from kvtierd.core.leases import LeftLease
from kvtierd.core.manager import BlockManager
from kvtierd.core.policy import GroupShape, Policy
from kvtierd.core.recovery import RecoveredBlock
from kvtierd.mover.cuda.copies import CudaCopies
from kvtierd.mover.runtime import CacheRuntime
from kvtierd.notify import Notifier
from kvtierd.service.budgets import Budgets, PastOptions, RememberedSlots, Slots, group_slots
from kvtierd.service.cache import CacheSettings, Wanted
from kvtierd.service.devices import Device, Devices
from kvtierd.service.forgotten import Forgotten
from kvtierd.service.recovery import NOBODY, About, Keeper, KeptArena, OldLife, adopt
from kvtierd.service.resizing import carry
from kvtierd.state import Identity
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import DeviceIOError, GpuUnavailable, NoDeviceMemory, NotAdoptable, TierConfigError, TierIOError
from kvtierd.tiers.cuda.pool import CudaDevice, CudaSegment, DaemonGpu, NoSegment
from kvtierd.tiers.disk.root import DiskRoot
from kvtierd.tiers.disk.store import DiskStore
from kvtierd.tiers.mapped import Chaos, HostStore, StandInDevice
from kvtierd.tiers.memfd import near

MANAGER_LETS_GO_S: Final = 5.0
"""Seconds that kept GPU memory may stay taken after the service manager was told to let go of it."""

_log = logging.getLogger(__name__)
_never_given_back: Final[list[Parts]] = []


@dataclass(slots=True, frozen=True)
class Stores:
    """The stores and the policy for all caches of a catalog. ``options``: defaults of a new cache. ``disk``: None if no
    disk tier is configured."""

    devices: Devices
    remembered: RememberedSlots
    disk: DiskRoot | None
    chaos: Chaos | None
    policy: Policy
    options: CacheSettings
    forgotten: Forgotten
    keeper: Keeper = field(default_factory=lambda: Keeper(Notifier(None), ()))

    def new_options(self, name: str, spec: CacheSpec, named: Wanted) -> CacheSettings:
        """Options of a new cache. An unnamed option is that of the last memory-only cache of the name."""
        options = self.options
        past = self.remembered.past_options(name, spec.fingerprint().hex())
        if past is not None:
            try:
                options = CacheSettings.from_stored(past)
            except (TypeError, ValueError) as error:
                _log.warning("remembered options are not used name=%s why=%r", name, str(error))
        return replace(options, resized=False, **named)


@dataclass(slots=True, frozen=True)
class Plan:
    """A cache to be made. ``stored``: it is on disk already. ``changed``: with other slots or options. ``unclean``: the
    life before did not end by a clean stop. ``old``: the earlier sessions whose leases are honoured if the cache's
    memory was kept; None = fresh memory. ``promised``: slots to be remembered; None = ``slots``. ``former``: the cache
    before a resize."""

    name: str
    spec: CacheSpec
    slots: Slots
    options: CacheSettings
    device: Device
    stored: bool = False
    unclean: bool = False
    old: OldLife | None = None
    changed: bool = False
    promised: Slots | None = None
    former: CacheRuntime | None = None

    @property
    def restarted(self) -> bool:
        """Whether anything is left of the cache's earlier life."""
        return self.stored or self.old is not None or self.former is not None

    @property
    def shapes(self) -> list[GroupShape]:
        return [
            GroupShape(
                GroupId(group),
                group_slots(self.slots, GroupId(group)),
                dict.fromkeys(self.slots, self.spec.record_bytes(group)),
                each.window_tokens,
                self.spec.tokens_per_block,
                each.sink_tokens,
                each.flat,
            )
            for group, each in enumerate(self.spec.groups)
        ]


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts of a cache, made by a thread before the loop knows of the cache. ``blocks``: recovered blocks in
    ``manager``."""

    arena: Arena
    host: HostStore | None
    device: StandInDevice | CudaDevice | None
    disk: DiskStore | None
    manager: BlockManager
    blocks: int
    left: Sequence[LeftLease] = ()
    cuda: CudaCopies | None = None
    lost: str | None = None
    """Why the device tier is out of service; None = it is in service, or the cache has none."""

    def close(self, *, for_successor: bool = False) -> bool:
        """Releases the parts. ``for_successor``: the memory is kept, and readers may go on with it.

        Returns False if a GPU may still copy to or from the memory, or has it page-locked for good: the memory then
        stays until the process ends.
        """
        if self.cuda is not None and not self.cuda.close():
            _never_given_back.append(self)
            return False
        if isinstance(self.device, StandInDevice):
            self.device.close()
        for store in (self.host, self.disk):
            if store is not None:
                store.close()
        self.arena.close(for_successor=for_successor)
        return True


class Assembler:
    """Makes the parts of caches, each call in a thread of its own. Memory is allocated for one cache at a time."""

    def __init__(self, stores: Stores, identity: Identity, sequencer: EventSequencer) -> None:
        self._stores: Final = stores
        self._sequencer: Final = sequencer
        self._identity: Final = identity
        self._allocating = threading.Lock()

    def assemble(self, plan: Plan, cache: CacheId) -> Parts:
        """Makes a cache's parts. Blocks. Memory comes first: unlike a disk store, it leaves no trace if the rest
        fails."""
        spec, slots = plan.spec, plan.slots
        identity = ArenaIdentity(spec.fingerprint(), self._identity.epoch, self._identity.boot, os.getpid())
        places = {(group, int(tier)): count for tier, counts in slots.items() for group, count in enumerate(counts)}
        layout = ArenaLayout.plan(spec, places)
        arena = self._adopted_arena(plan, layout, identity)
        old = plan.old if arena is not None else None
        if arena is None:
            arena = self._fresh_arena(plan, layout, identity)
        arena.keeps_records = self._stores.keeper.keeps
        try:
            gpu_memory = arena.gpu_memory
            if old is None or (gpu_memory is not None and gpu_memory.fresh):
                cuda = None if gpu_memory is None else gpu_memory.described
                self._stores.keeper.store(plan.name, arena, About(spec, slots, plan.options, cuda))
            self._remember(plan)  # before any event of the cache
            if plan.former is not None:
                carry(plan.former, arena, slots)
                old = NOBODY
            disk = self._disk_store(plan)
            try:
                return self._filled(plan, cache, arena, disk, old)
            except BaseException:
                if disk is not None:
                    disk.close()
                raise
        except BaseException:
            self._stores.keeper.forget(plan.name)
            if not plan.restarted:
                with suppress(TierIOError):  # else the next start would report the cache as lost
                    self._stores.remembered.forget(plan.name)
            arena.close()
            raise

    def _remember(self, plan: Plan) -> None:
        remembered, device = self._stores.remembered, plan.device.id
        if not plan.stored or plan.changed:
            in_memory = Tier.DISK not in plan.slots  # a disk store has its options
            past = PastOptions(plan.spec.fingerprint().hex(), plan.options.to_stored()) if in_memory else None
            each = [plan.spec.record_bytes(group) for group in range(len(plan.spec.groups))]
            remembered.put(plan.name, plan.promised or plan.slots, past, device, each)
        elif device and device != remembered.device(plan.name):  # moved: other caches may take its place there
            remembered.put(plan.name, remembered.get(plan.name) or plan.slots, None, device)

    def _filled(self, plan: Plan, cache: CacheId, arena: Arena, disk: DiskStore | None, old: OldLife | None) -> Parts:
        """The parts with the recovered blocks. ``old``: None unless the arena was adopted."""
        host = HostStore(arena) if Tier.HOST in plan.slots else None
        device = self._device(plan, arena)
        recovered: Mapping[GroupId, Sequence[RecoveredBlock]] = {}
        quarantined: Mapping[GroupId, Collection[SlotId]] = {}
        corrupt: Mapping[GroupId, Sequence[Key]] = {}
        if disk is not None and plan.stored:
            found = disk.recover()
            if found.dropped:
                says = "records on disk could not be used cache=%s dropped=%d of_these_corrupt=%d"
                _log.warning(says, plan.name, found.dropped, sum(map(len, found.corrupt.values())))
            recovered, quarantined, corrupt = found.records, found.quarantined, found.corrupt
        left: Sequence[LeftLease] = ()
        if old is not None:
            adopted = adopt(arena, plan.shapes, recovered, old)
            recovered, left = adopted.recovered, adopted.left
            _log.info("memory adopted cache=%s blocks=%d leases=%d", plan.name, adopted.in_memory, len(left))
        if plan.restarted:
            arena.rebuild_index(recovered)
        manager = BlockManager(cache, plan.shapes, self._sequencer, plan.options.policy(self._stores.policy))
        manager.fill(recovered, quarantined, corrupt, unclean=plan.unclean, restarted=plan.restarted)
        lost = arena.gpu_memory.why if isinstance(arena.gpu_memory, NoSegment) else None
        cuda = None
        try:
            cuda = _copies(plan, arena, host, device)
        except DeviceIOError as error:
            if not plan.restarted:
                raise
            device, lost = None, str(error)
        return Parts(arena, host, device, disk, manager, sum(map(len, recovered.values())), left, cuda, lost)

    def _device(self, plan: Plan, arena: Arena) -> StandInDevice | CudaDevice | None:
        if arena.gpu_memory is not None:
            return None if isinstance(arena.gpu_memory, NoSegment) else CudaDevice(arena.layout, arena.gpu_memory)
        return StandInDevice(arena, self._stores.chaos) if Tier.DEVICE in plan.slots else None

    def _fresh_arena(self, plan: Plan, layout: ArenaLayout, identity: ArenaIdentity) -> Arena:
        gpu = plan.device.gpu
        # Free memory can be checked for one cache at a time only.
        with self._allocating, near(None if gpu is None else gpu.node):
            gpu_memory = self._gpu_memory(plan, layout)
            try:
                return Arena.create(plan.name, layout, identity, gpu_memory)
            except BaseException:
                if gpu_memory is not None:
                    gpu_memory.close()
                raise

    def _gpu_memory(self, plan: Plan, layout: ArenaLayout) -> CudaSegment | NoSegment | None:
        """Fresh GPU memory; None if the cache needs none. A cache of an earlier life goes on without GPU memory if none
        can be allocated. Memory that a service manager was told to let go of is not free at once."""
        device, nbytes = plan.device, layout.data_bytes(Tier.DEVICE)
        if device.absent is not None and nbytes:
            return NoSegment(device.absent)
        if device.gpu is None or not nbytes:
            return None
        try:
            return device.gpu.create(plan.name, nbytes, MANAGER_LETS_GO_S if self._stores.keeper.keeps else 0.0)
        except (NoDeviceMemory, DeviceIOError) as error:
            if not plan.restarted:
                raise
            return NoSegment(str(error))

    def _adopted_arena(self, plan: Plan, layout: ArenaLayout, identity: ArenaIdentity) -> Arena | None:
        """The cache's memory from before the restart; None if it was not kept or is unfit. GPU memory may be fresh
        while the rest is adopted."""
        kept = self._stores.keeper.take(plan.name) if plan.old is not None else None
        if kept is None:
            return None
        try:
            return self._adopt(plan, layout, identity, kept)
        except NotAdoptable as error:
            _log.warning("memory of cache %s is dropped: %s", plan.name, error)
            self._stores.keeper.forget(plan.name)
            return None
        except BaseException:
            self._stores.keeper.forget(plan.name)
            raise

    def _adopt(self, plan: Plan, layout: ArenaLayout, identity: ArenaIdentity, kept: KeptArena) -> Arena:
        """Adopts a kept arena, and uses ``kept`` up even if it fails. Raises NotAdoptable."""
        with ExitStack() as undo:
            undo.callback(kept.close)
            gpu_memory = self._kept_gpu_memory(plan, layout, kept)
            if gpu_memory is not None:
                undo.callback(gpu_memory.close)
            arena = Arena.adopt(plan.name, layout, identity, kept.fds, gpu_memory)
            undo.pop_all()
        return arena

    def _kept_gpu_memory(self, plan: Plan, layout: ArenaLayout, kept: KeptArena) -> CudaSegment | NoSegment | None:
        """The kept GPU memory, taken out of ``kept``, or fresh memory in its place."""
        gpu, absent, nbytes = plan.device.gpu, plan.device.absent, layout.data_bytes(Tier.DEVICE)
        if not nbytes or (gpu is None and absent is None):
            return None
        fd = kept.fds.pop(attach.CUDA, None)
        try:
            if fd is None:
                raise NotAdoptable("it was not kept")
            if gpu is None:
                raise NotAdoptable(f"the GPU is lost: {absent}")
            return gpu.adopt(fd, nbytes, kept.cuda)
        except NotAdoptable as error:
            _log.warning("device blocks are lost: GPU memory is not adopted cache=%s why=%r", plan.name, str(error))
        finally:
            if fd is not None:
                os.close(fd)
        self._stores.keeper.forget(plan.name, attach.CUDA)
        with self._allocating:
            return self._gpu_memory(plan, layout)

    def _disk_store(self, plan: Plan) -> DiskStore | None:
        root = self._stores.disk
        if root is None or Tier.DISK not in plan.slots:
            return None
        if plan.stored and not plan.changed:
            return root.open_cache(plan.name)
        slots = {GroupId(group): count for group, count in enumerate(plan.slots[Tier.DISK])}
        options, label_bytes = plan.options.to_stored(), plan.options.label_bytes(plan.spec)
        if not plan.stored:
            return root.create(plan.name, plan.spec, slots, options, label_bytes)
        root.resize(plan.name, slots, options, label_bytes)
        return root.open_cache(plan.name)


def _copies(
    plan: Plan, arena: Arena, host: HostStore | None, device: StandInDevice | CudaDevice | None
) -> CudaCopies | None:
    if not isinstance(device, CudaDevice):
        return None
    segment = None if host is None else arena.data(Tier.HOST)
    try:
        return CudaCopies(plan.name, arena.layout, device, host, segment)
    except CudaError as error:
        raise DeviceIOError(f"cache {plan.name}: no streams to be had: {error}") from error


@dataclass(slots=True, frozen=True)
class Opened:
    """The device of a table, with the fields of :class:`Device`."""

    id: str
    gpu: DaemonGpu | None = None
    absent: str | None = None


def open_gpus(config: Config, known: Mapping[str, str]) -> list[Opened]:
    """The device of each table of ``config.device``. Blocks.

    A GPU that has failed is absent. A name without a device is a mistake, unless a GPU of an earlier start is missing
    now: then the name belongs to that GPU.

    Args:
        known: The uuids of an earlier start by name: :attr:`RememberedSlots.gpus`.

    Raises:
        TierConfigError: A mistake, a missing driver, or two tables for one GPU.
    """
    names, opened, failed = [table.name for table in config.device], dict[str, Opened](), dict[str, GpuUnavailable]()
    for name in names:
        try:
            gpu = None if name == STAND_IN else DaemonGpu.open(name)
            opened[name] = Opened(name if gpu is None else gpu.uuid, gpu)
        except GpuUnavailable as error:
            failed[name] = error
    for name, why in failed.items():
        opened[name] = _absent(name, why, known, {each.id for each in opened.values()})
    found: dict[str, Opened] = {}
    for name in names:
        if (device := opened[name].id) in found:
            raise TierConfigError("device", name, f"another table names {device} already: it must be in one table")
        found[device] = opened[name]
    return list(found.values())


def _absent(name: str, error: GpuUnavailable, known: Mapping[str, str], taken: Collection[str]) -> Opened:
    """The absent GPU of a table. Raises :class:`TierConfigError` if the table is a mistake."""
    missing = [uuid for uuid in (known.get(name), *known.values()) if uuid is not None and uuid not in taken]
    uuid = error.uuid if error.uuid not in (None, *taken) else next(iter(missing), None)
    if uuid is None or not (error.broken or uuid in missing):
        raise TierConfigError("device", name, str(error)) from error
    _log.error("GPU cannot be opened, its device tiers are out of service uuid=%s why=%r", uuid, str(error))
    return Opened(uuid, absent=str(error))


def open_devices(config: Config, opened: Sequence[Opened], keeper: Keeper, remembered: RememberedSlots) -> Devices:
    """The devices and their bytes. ``opened``: from :func:`open_gpus`. Blocks. Raises :class:`TierConfigError`."""
    sizes = {Tier.HOST: int(config.host_bytes), Tier.DISK: int(config.disk_bytes)}
    shared = Budgets({tier: size for tier, size in sizes.items() if size}, default=config.default_budget)
    devices = []
    for table, each in zip(config.device, opened, strict=True):
        device, gpu, stands_in = each.id, each.gpu, table.name == STAND_IN
        nbytes = int(table.bytes) if stands_in else _gpu_bytes(table, device, gpu, keeper, remembered)
        kind = "a stand-in" if stands_in else "a GPU"
        _log.info("device tiers are on %s device=%s bytes=%d", kind, device, nbytes)
        budgets = Budgets({Tier.DEVICE: nbytes}, shared, device, config.default_budget)
        devices.append(Device(table.name, device, gpu, budgets, each.absent))
    remembered.know({device.name: device.id for device in devices if device.name != STAND_IN})
    return Devices(devices, shared)


def _gpu_bytes(
    table: DeviceConfig, uuid: str, gpu: DaemonGpu | None, keeper: Keeper, remembered: RememberedSlots
) -> int:
    """The bytes of the table. Memory kept for this daemon counts as free: it is adopted or let go. A share stays as it
    was at the first start, and an absent GPU keeps its bytes.

    Raises :class:`TierConfigError` for more bytes than the GPU has. If fewer bytes are free now, caches that do not fit
    are refused at their opening.
    """
    share = f"{table.bytes} of {uuid}"
    if gpu is None:
        return remembered.shares.get(share, 0) if isinstance(table.bytes, Share) else int(table.bytes)
    free = min(gpu.total, gpu.memory()[0] + keeper.kept_on_gpu(gpu.driver.uuid.hex()))
    nbytes = int(table.bytes)
    if isinstance(table.bytes, Share):
        nbytes = remembered.share(share, table.bytes.of(free))
    if not 0 < nbytes <= gpu.total:
        limit = (
            f"it is {nbytes} bytes: must be 1 to the {gpu.total} that {gpu.driver.name} has, of which {free} are free"
        )
        raise TierConfigError("device", table, limit)
    if nbytes > free:
        _log.warning("more bytes are configured than are free there device=%s bytes=%d free=%d", gpu.uuid, nbytes, free)
    return nbytes


def described(devices: Devices) -> list[admin_pb2.DeviceStats]:
    return [
        admin_pb2.DeviceStats(kind=each.name)
        if each.name == STAND_IN
        else admin_pb2.DeviceStats(kind="cuda", name="lost", uuid=each.id)
        if (gpu := each.gpu) is None
        else admin_pb2.DeviceStats(kind="cuda", name=gpu.driver.name, uuid=gpu.uuid, memory_bytes=gpu.total)
        for each in devices
    ]
