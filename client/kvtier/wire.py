"""Arguments and results of a cache's verbs, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import EnumType
from functools import cache, partial
from struct import Struct
from typing import Any, Final, Generic, NoReturn, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvtier import types
from kvtier.abi.attention import Needed
from kvtier.abi.spec import CacheSpec
from kvtier.abi.words import KEY_BYTES
from kvtier.errors import CallerError, DaemonError, InvalidArgument, require_kind, require_within
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2

MAX_KEYS: Final = 16_384
"""Most keys of one verb; the daemon refuses more in a call."""

T = TypeVar("T")


class Held(Generic[T]):
    """A pending ``connect``, ``reserve`` or ``acquire``: await it for the client or the lease, or enter it to close or
    release that at the end."""

    def __init__(
        self, take: Callable[[], Coroutine[Any, Any, T]], give_back: Callable[[T], Coroutine[Any, Any, None]]
    ) -> None:
        self.take = take
        """Takes the lease. The caller must release it."""
        self.give_back = give_back
        """Releases a lease that :attr:`take` returned."""
        self._held: list[T] = []

    def __await__(self) -> Generator[Any, None, T]:
        return self.take().__await__()

    def __enter__(self) -> NoReturn:
        raise CallerError("enter this by `async with`; a synchronous program uses kvtier.Client", reason="ASYNC_ONLY")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> T:
        lease = await self.take()
        self._held.append(lease)
        return lease

    async def __aexit__(self, *_: object) -> None:
        await self.give_back(self._held.pop())


@dataclass(slots=True, frozen=True)
class GroupSpan:
    """A window group's part of a prefix, a residency byte a block: the ``sink_blocks`` first blocks of the chain, and
    the blocks from ``first_block`` to the end of the prefix."""

    group: int
    first_block: int
    residency: bytes
    sink_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Length of the prefix."""
        return self.first_block + len(self.residency) - self.sink_blocks


@dataclass(slots=True, frozen=True)
class Match:
    """A stored prefix of ``blocks`` blocks. ``groups``: a span for each window group that the request named.

    ``as_of``: the last event that the answer includes. ``remote_blocks``: the length of the prefix with the blocks of
    the remote store, where the request asked for it; it may turn out shorter.
    """

    blocks: int
    groups: tuple[GroupSpan, ...]
    as_of: types.Cursor
    remote_blocks: int = 0

    @property
    def residency(self) -> bytes:
        """Residency of each block in a match of one group; 0 = not needed, before a sliding window."""
        (span,) = self.groups
        return span.residency[: span.sink_blocks].ljust(span.first_block, b"\0") + span.residency[span.sink_blocks :]


@dataclass(slots=True, frozen=True)
class TokenMatch:
    """A stored prefix of ``tokens`` tokens: all tokens of the blocks of ``keys``, and the first ``partial_tokens`` of
    the block ``partial_key``, whose other tokens, if any, belong to another prompt; 0 and empty: no partial block.

    Acquire or get ``partial_key`` as a chain of its own: a chain that ends in it may hold a block too few of a sliding
    window.
    """

    tokens: int
    keys: bytes
    partial_tokens: int = 0
    partial_key: bytes = b""


@dataclass(slots=True, frozen=True)
class Location:
    """The places of one key's bytes. Slot and generation are None if the residency lacks the tier."""

    residency: int
    device_slot: int | None
    device_generation: int | None
    host_slot: int | None
    host_generation: int | None


def locations(
    residency: Sequence[int],
    device_slots: Sequence[int],
    device_generations: Sequence[int],
    host_slots: Sequence[int],
    host_generations: Sequence[int],
) -> list[Location]:
    """The places, from a column for each field. Values of a tier that a residency lacks are meaningless."""
    on_device = zip(device_slots, device_generations, strict=True)
    on_host = zip(host_slots, host_generations, strict=True)
    return [
        Location(
            tiers,
            *(device if tiers & types.Tier.DEVICE.bit else (None, None)),
            *(host if tiers & types.Tier.HOST.bit else (None, None)),
        )
        for tiers, device, host in zip(residency, on_device, on_host, strict=True)
    ]


@dataclass(slots=True, frozen=True)
class ReadCounts:
    """Counts of lookups and gets of a cache object since it was opened; all window groups count.

    ``lookups``: verbs answered from shared memory. ``hits``: blocks copied without a call; ``misses``: blocks that a
    get found absent without a call. ``reuses``: void copies of blocks, whose slot was given away meanwhile. ``calls``:
    verbs that asked the daemon.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    reuses: int = 0
    calls: int = 0


@dataclass(slots=True, frozen=True)
class ListedBlock:
    """An indexed block. ``parent`` None = the block is a root."""

    key: bytes
    parent: bytes | None
    residency: int
    priority: int
    pinned: int = 0
    """The tiers where the block is pinned, as a bit set."""


@dataclass(slots=True, frozen=True)
class Page:
    """Part of a listing. A listing is consistent if every page has the same ``as_of``."""

    blocks: tuple[ListedBlock, ...]
    as_of: types.Cursor


@dataclass(slots=True, frozen=True)
class DropReport:
    """The effect of a drop. ``results``: one per key; ``dropped``: number of blocks, subtrees included.
    ``kept_in_store``: as in :class:`ResetReport`."""

    results: list[types.BlockResult]
    dropped: int
    kept_in_store: bool = False


@dataclass(slots=True, frozen=True)
class ResetReport:
    """The effect of a reset. ``kept``: number of blocks that are leased or pinned, and of their ancestors.

    ``kept_in_store``: the remote store did not answer; other daemons may read the blocks there until this daemon has
    told the store, which it does by itself. ``generation``: pass it to :meth:`Cache.reset` to repeat this reset.
    """

    dropped: int
    kept: int
    kept_in_store: bool = False
    generation: int = 0


Keys = bytes | bytearray | memoryview | Iterable[bytes]
"""Block keys: packed, 32 bytes each, or as an iterable."""

Budgets = (
    Mapping[types.Tier, types.AnySize | Sequence[types.AnySize]] | Mapping[str, types.AnySize | Sequence[types.AnySize]]
)
"""Bytes by tier: a number for all window groups together, which the daemon splits, or one number per group."""


def packed_keys(keys: Keys, field: str = "keys") -> bytes:
    """Keys in wire format. Raises :class:`InvalidArgument` if a key is not 32 bytes, or there are too many."""
    packed = _packed_keys(keys, field)
    if len(packed) > MAX_KEYS * KEY_BYTES:
        raise InvalidArgument(field, f"{len(packed) // KEY_BYTES} keys", f"at most {MAX_KEYS} keys")
    return packed


def _packed_keys(keys: Keys, field: str) -> bytes:
    if isinstance(keys, (bytes, bytearray, memoryview)):
        packed = bytes(keys)
        if len(packed) % KEY_BYTES:
            raise InvalidArgument(field, f"{len(packed)} bytes", f"a multiple of {KEY_BYTES} bytes")
        return packed
    try:
        listed = list(keys)
    except TypeError as error:
        raise InvalidArgument(field, keys, f"bytes, or keys one by one, {KEY_BYTES} bytes each") from error
    with suppress(TypeError):  # the fast check of all keys
        packed = b"".join(listed)
        if len(packed) == KEY_BYTES * len(listed) and list(map(len, listed)).count(KEY_BYTES) == len(listed):
            return packed
    index, key = next(each for each in enumerate(listed) if not isinstance(each[1], bytes) or len(each[1]) != KEY_BYTES)
    shown = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
    raise InvalidArgument(f"{field}[{index}]", shown, f"bytes, {KEY_BYTES} of them")


def key_prefix(field: str, value: bytes | str, shortest: int = 1) -> bytes:
    """The prefix of a block key, from bytes or hex. Raises :class:`InvalidArgument` if it is not ``shortest`` to 32
    bytes."""
    limit = f"{shortest} to {KEY_BYTES} bytes, or {2 * shortest} to {2 * KEY_BYTES} hexadecimal digits, an even number"
    try:
        prefix = bytes.fromhex(value) if isinstance(value, str) else bytes(memoryview(value))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(field, value, limit) from error
    if not shortest <= len(prefix) <= KEY_BYTES:
        raise InvalidArgument(field, value, limit)
    return prefix


P = ParamSpec("P")
M = TypeVar("M", bound=Message)
_HOLDS: Final[Mapping[int, str]] = {
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_UINT32: "0 to 2^32 - 1, as a whole number",
    FieldDescriptor.TYPE_UINT64: "0 to 2^64 - 1, as a whole number",
}


def message(kind: Callable[P, M], *args: P.args, **fields: P.kwargs) -> M:
    """Makes a message. Raises :class:`InvalidArgument` for a value that its field cannot hold."""
    try:
        return kind(*args, **fields)
    except (TypeError, ValueError) as error:
        make: Any = kind
        for name, value in fields.items():
            try:
                make(**{name: value})
            except (TypeError, ValueError):
                holds = make.DESCRIPTOR.fields_by_name[name].type
                raise InvalidArgument(name, repr(value), _HOLDS.get(holds, str(error))) from error
        raise


MAX_COUNT: Final = (1 << 32) - 1
_MOST_RECOMPUTE_S: Final = 3600.0


def packed_chains(chains: Iterable[Keys]) -> list[bytes]:
    """Keys of several chains in wire format; errors name the chain."""
    require_kind("chains", chains, Iterable)
    return [packed_keys(keys, f"chains[{index}].keys") for index, keys in enumerate(chains)]


def granted(chain: blocks_pb2.AcquiredChain, part: blocks_pb2.AcquiredGroup) -> Needed:
    """The blocks of a chain that a group's part of an acquire holds."""
    return Needed(part.sink_blocks, chain.blocks - len(part.found_in) + part.sink_blocks, chain.blocks)


def split_keys(packed: bytes) -> list[bytes]:
    if len(packed) % KEY_BYTES:
        raise DaemonError(f"{len(packed)} bytes of keys: not a multiple of {KEY_BYTES}", reason="BAD_ANSWER")
    return list(Struct(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES)).unpack(packed))


_TIERS: Final = {str(tier): tier for tier in types.TIERS}


def as_tier(tier: types.AnyTier, field: str = "tier") -> types.Tier:
    """A tier given by itself or by its name. Raises :class:`InvalidArgument`."""
    if isinstance(tier, types.Tier):
        return tier
    if not isinstance(tier, str) or (found := _TIERS.get(tier)) is None:
        raise InvalidArgument(field, tier, " or ".join(_TIERS))
    return found


def tier_to_wire(tier: types.AnyTier, field: str = "tier") -> common_pb2.Tier.ValueType:
    return common_pb2.Tier.ValueType(as_tier(tier, field) + 1)


def tier_from_wire(value: int) -> types.Tier:
    try:
        return types.Tier(value - 1)
    except ValueError as error:
        raise DaemonError(f"tier {value} in an answer: this client does not know it", reason="BAD_ANSWER") from error


def spec_to_wire(spec: CacheSpec) -> caches_pb2.CacheSpec:
    return caches_pb2.CacheSpec(**spec.to_dict())


def session_number(session_id: int) -> int:
    """A session's number, checked. Raises :class:`InvalidArgument`."""
    return require_within("session_id", session_id, 1, (1 << 64) - 1, "1 to 2^64 - 1")


def _u64(field: str, value: int) -> int:
    """A u64, checked here because protobuf's own error names no field."""
    return require_within(field, value, 0, (1 << 64) - 1, "0 to 2^64 - 1")


def _bytes(field: str, value: types.AnySize) -> int:
    found = types.parsed_size(value) if isinstance(value, str) else value
    if not isinstance(found, int):
        raise InvalidArgument(field, value, "bytes, or text such as 64MiB")
    return _u64(field, found)


def recompute_to_wire(seconds: float) -> int:
    """The cost of computing a block, in nanoseconds. Raises :class:`InvalidArgument`."""
    require_within("recompute_seconds_per_block", seconds, 0, _MOST_RECOMPUTE_S, f"0 to {_MOST_RECOMPUTE_S:g} seconds")
    return round(seconds * 1e9)


def budgets_to_wire(budgets: Budgets | None) -> list[caches_pb2.TierBudget]:
    require_kind("budgets", budgets, Mapping, type(None))
    return [_budget(tier, asked) for tier, asked in (budgets or {}).items()]


def _budget(tier: types.AnyTier, asked: types.AnySize | Sequence[types.AnySize]) -> caches_pb2.TierBudget:
    field = f"budgets[{tier}]"
    place = tier_to_wire(tier, field)
    if isinstance(asked, (int, str)):
        return caches_pb2.TierBudget(tier=place, bytes=_bytes(field, asked))
    if not isinstance(asked, Iterable):
        raise InvalidArgument(field, asked, "bytes, text such as 64MiB, or a list of either, by window group")
    by_group = [_bytes(f"{field}[{group}]", each) for group, each in enumerate(asked)]
    return caches_pb2.TierBudget(tier=place, bytes=_u64(field, sum(by_group)), group_bytes=by_group)


def options_to_wire(options: types.CacheOptions) -> caches_pb2.CacheOptions:
    require_kind("options", options, types.CacheOptions)
    require_kind("options.write_policy", options.write_policy, types.WritePolicy)
    require_kind("options.thresholds", options.thresholds, Mapping)
    return message(
        caches_pb2.CacheOptions,
        write_policy=caches_pb2.WritePolicy.ValueType(options.write_policy),
        eviction=options.eviction,
        event_hash=options.event_hash,
        keep_tokens=options.keep_tokens,
        thresholds=[_threshold(edge, least) for edge, least in options.thresholds.items()],
        checksum=options.checksum,
    )


def _threshold(edge: tuple[types.AnyTier, types.AnyTier], least: int) -> caches_pb2.EdgeThreshold:
    if not isinstance(edge, tuple) or len(edge) != 2:
        raise InvalidArgument("options.thresholds", edge, "least priorities by edge, a tuple of two tiers")
    above, below = map(tier_to_wire, edge)
    return message(caches_pb2.EdgeThreshold, to=below, min_priority=least, **{"from": above})


def options_from_wire(message: caches_pb2.CacheOptions) -> types.CacheOptions:
    try:
        write_policy = types.WritePolicy(message.write_policy)
    except ValueError as error:
        says = f"write policy {message.write_policy} in an answer: this client does not know it"
        raise DaemonError(says, reason="BAD_ANSWER") from error
    thresholds = {
        (tier_from_wire(getattr(each, "from")), tier_from_wire(each.to)): each.min_priority
        for each in message.thresholds
    }
    return same_fields(types.CacheOptions, message, write_policy=write_policy, thresholds=thresholds)


def cache_info(message: caches_pb2.CacheInfo) -> types.CacheInfo:
    spec, options = CacheSpec.of(message.spec), options_from_wire(message.options)
    return same_fields(types.CacheInfo, message, spec=spec, options=options)


def holdings(message: admin_pb2.HoldingsResponse) -> types.Holdings:
    found = tuple(
        same_fields(types.Holding, one, tiers={tier_from_wire(each.tier): each.blocks for each in one.tiers})
        for one in message.found
    )
    return same_fields(types.Holdings, message, keys=tuple(split_keys(message.keys)), found=found)


def same_fields(answer: Callable[..., T], message: Message, **converted: object) -> T:
    """A dataclass with the message's fields of the same names, by the types of the dataclass. ``converted`` has the
    fields that differ."""
    for name, of in _conversions(answer).items():
        if name not in converted:
            value = getattr(message, name)
            converted[name] = value if of is None else of(value)
    return answer(**converted)


@cache
def _conversions(answer: Any) -> dict[str, Callable[[Any], Any] | None]:
    kinds = get_type_hints(answer)
    return {field.name: _conversion(kinds[field.name]) for field in fields(answer)}


def _conversion(kind: Any) -> Callable[[Any], Any] | None:
    """Returns a function that makes a value of this type from a field of a message; None: the value is the field."""
    if kind is types.Tier:
        return tier_from_wire
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(same_fields, kind)
    if get_origin(kind) is tuple:
        each = _conversion(get_args(kind)[0])
        return tuple if each is None else lambda values: tuple(map(each, values))
    if get_origin(kind) is Mapping:
        return dict
    return kind if isinstance(kind, EnumType) else None
