"""What can be asked of a mirror: by the event loop that it follows its daemon on, and by any other thread."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Final

from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import MAX_GROUPS
from kvtier.answers import AcrossMatch
from kvtier.errors import InvalidArgument, KvtierError
from kvtier.kinds import is_integer, quoted, require_kind
from kvtier.mirror.index import ALL_TIERS, MirroredBlock, MirrorIndex
from kvtier.types import Cursor, Tier
from kvtier.watch import Watch
from kvtier.wire import Keys, packed_keys

_NOWHERE: Final = Cursor(0, 0)


class MirrorState(StrEnum):
    """What a mirror's answers are worth."""

    SYNCING = "syncing"
    """Its first snapshot is not complete: it knows no block."""
    EXACT = "exact"
    """It says what the daemon's listings said at :attr:`MirrorView.cursor`, and hears of every change since."""
    STALE = "stale"
    """It says what was so at :attr:`MirrorView.cursor`; it has lost the daemon, or events, and makes up for it."""


class MirrorView:
    """The index of a mirror and how it stands. Looks never wait and never call the daemon.

    Threads besides the loop's may look: each sees a block as it was before or after any change.
    """

    def __init__(self, caches: Collection[str]) -> None:
        """Raises :class:`InvalidArgument`: caches are followed by name, so that a right that is missing, or taken away,
        is an error and no silence."""
        if isinstance(caches, (str, bytes)) or not isinstance(caches, Collection) or not len(caches):
            raise InvalidArgument("caches", caches, "a list of one name at least")
        for index, name in enumerate(caches):
            require_kind(f"caches[{index}]", name, str, "text")
        self.caches: Final = tuple(dict.fromkeys(caches))
        self.resyncs = 0
        """How many snapshots have replaced an index that could not be kept exact."""
        self.problem: KvtierError | None = None
        """Why the last attempt to follow the daemon ended; None once the mirror is exact."""
        self._index = MirrorIndex()
        self._cursor: Cursor | None = None
        self._watch: Watch | None = None
        """The stream that keeps the index exact; None: it stands still."""

    @property
    def state(self) -> MirrorState:
        watch = self._watch
        if watch is not None and watch.live:
            return MirrorState.EXACT
        return MirrorState.SYNCING if self._cursor is None else MirrorState.STALE

    @property
    def cursor(self) -> Cursor | None:
        """The event up to which the index is exact, stale or not; None before the first snapshot."""
        return self._cursor

    @property
    def lag(self) -> int:
        """Events that the daemon had given out and the index has not, as of the daemon's last word; a mirror that is
        stale can be farther behind."""
        return 0 if self._watch is None else self._watch.lag

    def __len__(self) -> int:
        """Blocks of all window groups of all caches."""
        return len(self._index)

    def longest_prefix(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> int:
        """How many leading blocks of the chain the daemon can serve, over all window groups: see :meth:`match`, which
        also says where they are."""
        return self._index.prefix_length(self._named(cache), packed_keys(keys), _bits(tiers))

    def match(self, keys: Keys, cache: str | None = None, *, tiers: Collection[Tier] = ()) -> AcrossMatch:
        """As :meth:`kvtier.across.AcrossGroups.match` at :attr:`cursor`, without a call.

        ``cache``: not needed where only one is followed. ``tiers``: counts only blocks that are in one of these; empty:
        in any. Packed keys save the work of packing them. Raises :class:`InvalidArgument`.
        """
        cursor = self._cursor or _NOWHERE
        groups = self._index.match(self._named(cache), packed_keys(keys), _bits(tiers))
        blocks = groups[0].first_block + len(groups[0].residency) if groups else 0
        return AcrossMatch(blocks, groups, cursor)

    def residency(self, key: bytes, cache: str | None = None, *, group: int = 0) -> int:
        """The set of tiers, as bits; 0 = it is not indexed."""
        block = self._find(key, cache, group)
        return 0 if block is None else block.residency

    def priority(self, key: bytes, cache: str | None = None, *, group: int = 0) -> int | None:
        """The effective one; None = it is not indexed."""
        block = self._find(key, cache, group)
        return None if block is None else block.priority

    def blocks(self, cache: str | None = None, *, group: int = 0) -> Iterator[MirroredBlock]:
        """Every block of a window group as it is now, in no order: what comes later changes nothing of it."""
        require_group(group)
        return self._index.blocks(self._named(cache), group)

    def _find(self, key: bytes, cache: str | None, group: int) -> MirroredBlock | None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            shown = f"{len(key)} bytes" if isinstance(key, bytes) else key
            raise InvalidArgument("key", shown, f"{KEY_BYTES} bytes")
        require_group(group)
        return self._index.get(self._named(cache), group, key)

    def _named(self, cache: str | None) -> str:
        if cache is None and len(self.caches) == 1:
            return self.caches[0]
        if cache not in self.caches:
            raise InvalidArgument("cache", cache, f"one of {', '.join(self.caches)}")
        return cache


def require_group(group: int) -> None:
    if not is_integer(group, 0, MAX_GROUPS - 1):
        raise InvalidArgument("group", quoted(group), f"0 to {MAX_GROUPS - 1}")


def _bits(tiers: Collection[Tier]) -> int:
    try:
        return sum({tier.bit for tier in tiers}) or ALL_TIERS
    except (TypeError, AttributeError) as error:
        raise InvalidArgument("tiers", tiers, "a list of kvtier.Tier, even of one") from error
