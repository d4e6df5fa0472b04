"""The actions of a world. An action draws its own details, and does nothing if it is not possible now."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvtierd.core.ids import Key, SessionId, SlotId, Tier
from kvtierd.core.transfers import ChainRequest, CommitItem
from tests.simulation.chooser import Chooser
from tests.simulation.forest import label_of
from tests.simulation.remains import Died
from tests.simulation.site import Site
from tests.simulation.world import World

PRIORITIES: Final = (35, 35, 35, 35, 0, 10, 29, 30, 49, 50, 100)
"""Mostly the default priority; some lie on either side of the thresholds of demotion."""

DURATIONS_MS: Final = (0, 0, 0, 0, 500, 2_000, 20_000)

Action = Callable[[World, Chooser], None]


def reserve(world: World, choose: Chooser) -> None:
    if world.memory_tiers:
        site, tier = _site(world, choose), choose.pick(world.memory_tiers)
        world.reserve(_session(world, choose), site, tier, choose.between(1, min(4, site.slots[tier])))


def scribble(world: World, choose: Chooser) -> None:
    """A client writes a slot that it leased, perhaps in an earlier life of the daemon. Not a call."""
    writers = [holding for holding in world.clients.usable if holding.blank]
    if writers:
        holding = choose.pick(writers)
        world.clients.scribble(holding, choose.pick(list(holding.blank)))
    earlier = [holding for held in world.clients.remnants.values() for holding in held if holding.blank]
    if earlier:
        holding = choose.pick(earlier)
        world.clients.scribble_on_remains(holding, choose.pick(list(holding.blank)))


def commit(world: World, choose: Chooser) -> None:
    """Commits mostly the next blocks of a chain, and some blocks that exist, lack their parent or claim a wrong
    parent."""
    writers = [holding for holding in world.clients.usable if holding.blank]
    if not writers:
        return
    holding = choose.pick(writers)
    site = world.sites[holding.plan.group]
    slots = list(holding.blank)
    keys = _to_store(world, site, choose, len(slots))
    items = [_item(world, site, choose, slot, key) for slot, key in zip(slots, keys, strict=False)]
    world.commit(holding, items, hold=choose.chance(80), release=choose.chance(30))


def join(world: World, choose: Chooser) -> None:
    if world.clients.usable:
        world.join(_session(world, choose), choose.pick(world.clients.usable))


def _to_store(world: World, site: Site, choose: Chooser, most: int) -> Sequence[Key]:
    if choose.chance(15):
        return choose.some(world.forest.keys, most)
    chain = world.forest.chain(choose.pick(world.forest.keys))
    missing = [key for key in chain if key not in site.mirror.blocks]
    return (missing or chain)[: choose.between(1, most)]


def _item(world: World, site: Site, choose: Chooser, slot: SlotId, key: Key) -> CommitItem:
    parent = world.forest.parent[key]
    if key in site.mirror.blocks and choose.chance(20):
        parent = choose.pick([other for other in world.forest.keys if other != key])
    return CommitItem(slot, key, parent, choose.pick(PRIORITIES), choose.pick(DURATIONS_MS), label_of(key))


def acquire(world: World, choose: Chooser) -> None:
    if world.memory_tiers:
        tier = choose.pick(world.memory_tiers)
        world.acquire(_session(world, choose), [_site(world, choose)], tier, _chains(world, choose))


def acquire_across(world: World, choose: Chooser) -> None:
    if world.memory_tiers:
        tier = choose.pick(world.memory_tiers)
        world.acquire(_session(world, choose), list(world.sites.values()), tier, _chains(world, choose))


def _chains(world: World, choose: Chooser) -> list[ChainRequest]:
    chains = []
    for _ in range(choose.between(1, 3)):
        keys = world.forest.chain(choose.pick(world.forest.keys))
        if choose.chance(3):
            keys = keys[:0]  # a prompt shorter than a block
        least = choose.below(len(keys) + 1) if choose.chance(40) else 0
        retention = _retention(choose, len(keys)) if choose.chance(20) else ((), ())
        chains.append(ChainRequest(keys, least, *retention))
    return chains


def touch(world: World, choose: Chooser) -> None:
    site = _site(world, choose)
    stored = list(site.mirror.blocks)
    keys = choose.some(stored if stored and choose.chance(80) else world.forest.keys, 4)
    world.touch(site, keys, choose.below(3))


def retain(world: World, choose: Chooser) -> None:
    site = _site(world, choose)
    stored = list(site.mirror.blocks)
    keys = choose.some(stored if stored and choose.chance(80) else world.forest.keys, 4)
    world.retain(_session(world, choose), site, keys, *_retention(choose, len(keys)))


def _retention(choose: Chooser, blocks: int) -> tuple[list[int], list[int]]:
    """Draws priorities and durations."""
    return [choose.pick(PRIORITIES) for _ in range(blocks)], [choose.pick(DURATIONS_MS) for _ in range(blocks)]


def release(world: World, choose: Chooser) -> None:
    if world.clients.usable:
        first = choose.pick(world.clients.usable)
        slots = [*first.blank, *first.blocks]
        if slots and choose.chance(25):
            world.give_back(first, choose.some(slots, len(slots)))
            return
        of_session = [lease for lease, holding in world.clients.leases.items() if holding.session == first.session]
        world.release(first.session, choose.some(of_session, 3))


def move(world: World, choose: Chooser) -> None:
    keys = choose.some(world.forest.keys, 4)
    if choose.chance(50):
        keys = list(world.forest.chain(keys[0]))
    world.move(_session(world, choose), _site(world, choose), choose.pick(world.tiers), keys)


def drop(world: World, choose: Chooser) -> None:
    session, site = _session(world, choose), _site(world, choose)
    parents = [key for key in site.mirror.blocks if key in world.forest.parent.values()]
    keys = choose.some(parents if parents and choose.chance(50) else world.forest.keys, 3)
    if choose.chance(30):
        world.plan_drop(session, site, keys)
    else:
        world.drop(session, site, keys, lambda: _meanwhile_of(world, choose, site, keys))


def _meanwhile_of(world: World, choose: Chooser, site: Site, keys: Sequence[Key]) -> None:
    """Between two slices of a drop, often acquires a part of the blocks that are being dropped."""
    chains = [world.forest.chain(key) for key in site.mirror.blocks]
    through = [chain for chain in chains if not set(keys).isdisjoint(chain[:-1])]
    if through and world.memory_tiers and choose.chance(50):
        tier = choose.pick(world.memory_tiers)
        world.acquire(_session(world, choose), [site], tier, [ChainRequest(choose.pick(through))])
    else:
        _meanwhile(world, choose)


def pin(world: World, choose: Chooser) -> None:
    site, tier = _site(world, choose), choose.pick(world.tiers)
    pinned = [key for (of, key), count in site.pins.items() if of is tier and count]
    there = [key for key, change in site.mirror.blocks.items() if change.residency & tier.bit]
    unpin = choose.chance(60)
    keys = choose.some((pinned if unpin else there) or world.forest.keys, 3)
    world.pin(_session(world, choose), site, tier, keys, unpin=unpin)


def carry(world: World, choose: Chooser) -> None:
    world.carry(_site(world, choose), choose.between(1, 4), choose.pick((1.0, 0.5, 0.0)))


def reset(world: World, choose: Chooser) -> None:
    world.reset(_session(world, choose), force=choose.chance(50))


def expire(world: World, choose: Chooser) -> None:
    if world.clients.requests:
        world.expire(choose.pick(list(world.clients.requests.values())))


def cancel(world: World, choose: Chooser) -> None:
    if world.clients.requests:
        world.cancel(choose.pick(list(world.clients.requests.values())))


def orphan(world: World, choose: Chooser) -> None:
    world.orphan(_session(world, choose))


def disown(world: World, choose: Chooser) -> None:
    world.disown(_session(world, choose))


def reattach(world: World, choose: Chooser) -> None:
    world.reattach(choose.pick(sorted(world.clients.orphaned) or list(world.clients.sessions)))


def end(world: World, choose: Chooser) -> None:
    world.end(_session(world, choose))


def end_remnant(world: World, choose: Chooser) -> None:
    if world.clients.remnants:
        world.end_remnant(choose.pick(sorted(world.clients.remnants)))


def report(world: World, choose: Chooser) -> None:
    if world.in_flight:
        world.report(choose)


def tick(world: World, choose: Chooser) -> None:
    world.wait(choose.pick((1, 10**9, 10**10)))
    world.tick()
    world.note_uses()


def rot(world: World, choose: Chooser) -> None:
    """The disk's bytes flip. Not a call."""
    disk = _site(world, choose).disk
    if disk is not None:
        disk.rot(SlotId(choose.below(len(disk.slab))))


def lose(world: World, choose: Chooser) -> None:
    if Tier.DISK in world.tiers:
        world.lose(Tier.DISK, lambda: _meanwhile(world, choose))


def spoil(world: World, choose: Chooser) -> None:
    """A copy's bytes are found bad, mostly of a block with children. Other calls come before the descendants have
    gone."""
    site = _site(world, choose)
    blocks = site.mirror.blocks.values()
    there = [(change.key, tier) for change in blocks for tier in site.slots if change.residency & tier.bit]
    parents = {change.parent for change in blocks}
    below = [place for place in there if place[0] in parents]
    if there:
        world.lose_bytes(site, *choose.pick(below or there))
        for _ in range(choose.below(4)):
            _meanwhile(world, choose)


def lose_device(world: World, choose: Chooser) -> None:
    """Loses the device tier until a restart. Seldom, so that most walks keep the device."""
    if Tier.DEVICE in world.tiers and choose.chance(20):
        world.lose(Tier.DEVICE, lambda: _meanwhile(world, choose))


def undercut(world: World, choose: Chooser) -> None:
    """Loses the disk while a request waits to read from it, which hardly ever happens by chance."""
    if world.awaits_disk():
        world.lose(Tier.DISK, lambda: _meanwhile(world, choose))


def go_on(world: World, choose: Chooser) -> None:
    world.go_on()


def _meanwhile(world: World, choose: Chooser) -> None:
    """Lets other clients call between two slices of a drop, or of the disk's loss."""
    world.progress(choose)
    if choose.chance(60):
        choose.pick(MEANWHILE)(world, choose)


def restore(world: World, choose: Chooser) -> None:
    if Tier.DISK in world.lost:
        world.restore_disk()


def drain(world: World, choose: Chooser) -> None:
    world.drain(choose)


def settle(world: World, choose: Chooser) -> None:
    world.settle(choose)


def crash(world: World, choose: Chooser) -> None:
    """Crashes the daemon, often in the middle of a call."""
    if choose.chance(60):
        world.lifetime.ends_after(choose.below(10))
        try:
            choose.pick(MEANWHILE)(world, choose)
        except Died:
            world.seen["died in the middle of a call"] += 1
        world.lifetime.ends_after(None)
    world.restart(choose, clean=False)


def stop_and_start(world: World, choose: Chooser) -> None:
    world.restart(choose, clean=True)


MEANWHILE: Final[Sequence[Action]] = (
    *(report, report, report, reserve, join, commit, commit, acquire, acquire_across, release),
    *(go_on, move, drop, retain, pin, carry, reset, expire, cancel, orphan, disown, reattach, end, end_remnant),
)
"""Calls that may come at any time."""

WEIGHTS: Final[Mapping[Action, int]] = {
    report: 330,
    acquire: 110,
    acquire_across: 70,
    reserve: 130,
    commit: 130,
    join: 40,
    release: 130,
    move: 40,
    scribble: 20,
    drop: 10,
    touch: 30,
    retain: 12,
    pin: 14,
    carry: 20,
    reset: 1,
    go_on: 120,
    tick: 20,
    expire: 15,
    cancel: 10,
    orphan: 6,
    disown: 3,
    reattach: 8,
    end: 6,
    end_remnant: 6,
    rot: 6,
    spoil: 12,
    lose: 4,
    lose_device: 1,
    undercut: 24,
    restore: 10,
    drain: 8,
    settle: 1,
    crash: 3,
    stop_and_start: 1,
}
"""Relative frequency of each action in a random walk."""


def _site(world: World, choose: Chooser) -> Site:
    return choose.pick(list(world.sites.values()))


def _session(world: World, choose: Chooser) -> SessionId:
    attached = [session for session in world.clients.sessions if session not in world.clients.orphaned]
    return choose.pick(attached or list(world.clients.sessions))
