"""The specification of a cache: its limits, the sizes that follow from it, and its fingerprint.

Fingerprint: SHA-256 over, without padding, integers little-endian::

    16 bytes  b"kvtier.cachespec"
    u32       version: 1 if every pool has the cache's dtype, else 2; 3 if the specification has fields of version 3
    u32 + n   length of the model name in UTF-8, the name
    u32 + n   length of the dtype name, the name
    u32 x 4   tokens_per_block, rank, world_size, number of groups
    a group:  u32 window_tokens, u32 number of pools
              in version 3 also u32 flat (0 or 1), u32 sink_tokens
    a pool:   u32 layers, u32 kv_heads, u32 head_size, u32 kv_factor
              in versions 2 and 3 also u32 + n, length of the pool's dtype name, the name; in 3 also u64 block_bytes
    version 3 ends with the identity: u32 number of pairs; by name, u32 + n and the name, u32 + n and the value

Two caches may exchange bytes only if their fingerprints are equal. The fingerprint of a specification never changes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from kvtier.abi.attention import Attention

PAGE: Final = 4096
"""Alignment of every part on host and disk: direct I/O requires it of addresses, offsets and lengths."""

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

MAX_BLOCK_BYTES: Final = 1 << 30
"""Largest block of a group, over all its pools."""

MAX_GROUPS: Final = 16
MAX_POOLS: Final = 64

STATE: Final = 1
"""Window of a group whose layers keep a state: a prefix needs the state after its last token only."""
STATE_TOKENS: Final = 4096
"""Tokens of a sequence for each state that a budget has room for."""


_ONE_DTYPE: Final = 1
_DTYPE_A_POOL: Final = 2
_IDENTITY: Final = 3
_MAX_IDENTITY: Final = 64
_MAX_MODEL_BYTES: Final = 256
_MAX_WINDOW_TOKENS: Final = 2**31 - 1
_POOL_LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "layers": (1, 4096),
    "kv_heads": (1, 4096),
    "head_size": (1, 65536),
    "kv_factor": (1, 2),
}
_OPAQUE_LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(_POOL_LIMITS, (0, 0)),
    "block_bytes": (1, MAX_BLOCK_BYTES),
}
_MAX_TOKENS_PER_BLOCK: Final = 65536
_MAX_WORLD_SIZE: Final = 65536


class KvtierError(Exception):
    """Base of all errors that kvtier raises on purpose. ``reason`` is stable and machine readable."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class CallerError(KvtierError):
    """The call is wrong; repeating it does not help."""


class InvalidArgument(CallerError):
    """A value outside its limit. The message and the attributes name field, value and limit."""

    def __init__(self, field: str, value: object, limit: str, *, reason: str = "BAD_ARGUMENT") -> None:
        shown = value if isinstance(value, str) else repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: must be {limit}", reason=reason)
        self.field = field
        self.value = shown
        self.limit = limit


class AbiError(InvalidArgument, ValueError):
    """A control segment is damaged or of another version, or a slot does not exist."""


class SpecError(InvalidArgument, ValueError):
    """A specification breaks a limit."""


def require_int(field: str, value: object, low: int, high: int, error: type[InvalidArgument]) -> int:
    """Returns ``value`` if it is an integer in [low, high], else raises ``error``. A bool is no integer here."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise error(field, value, f"an integer from {low} to {high}")
    return value


def require_all(field: str, values: object, kind: type, error: type[InvalidArgument]) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(each, kind) for each in values):
        raise error(field, values, f"a tuple of {kind.__name__}")


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``PAGE``."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(slots=True, frozen=True)
class PoolSpec:
    """The data of a token in layers with the same KV heads. Extra data, like block scales, has a pool, too.

    ``kv_factor`` 2 = keys and values, 1 = keys only (MLA). ``dtype`` "" = the cache's. 4-bit KV has a pool of uint8
    with half the head size for the data, and a pool of float8_e4m3 with a sixteenth of it for the scales.
    ``block_bytes``: bytes of a block in an opaque pool, whose other fields are zero.
    """

    layers: int
    kv_heads: int
    head_size: int
    kv_factor: int = 2
    dtype: str = ""
    block_bytes: int = 0

    @classmethod
    def opaque(cls, block_bytes: int) -> Self:
        """Returns a pool of ``block_bytes`` per block. The engine defines the bytes: see :attr:`CacheSpec.identity`."""
        return cls(0, 0, 0, 0, block_bytes=block_bytes)


@dataclass(slots=True, frozen=True)
class WindowGroupSpec:
    """Pools whose blocks come and go together. ``window_tokens`` 0 = full attention, 1 = the state of a sequence after
    the block, else a sliding window.

    ``flat``: its keys form no chains; each block is stored, found and evicted by itself. ``sink_tokens``: number of
    first tokens of a sequence that stay in a sliding window.
    """

    window_tokens: int = 0
    pools: tuple[PoolSpec, ...] = ()
    flat: bool = False
    sink_tokens: int = 0

    @property
    def opaque(self) -> bool:
        """Whether the blocks are an engine's pages. A later sequence may continue after any page."""
        return all(pool.block_bytes for pool in self.pools)


@dataclass(slots=True, frozen=True)
class CacheSpec:
    """The meaning of a cache's bytes. Sizes and fingerprint are defined for specifications that pass :meth:`validate`.

    ``identity``: other properties that two caches must share to exchange bytes, by name: layout, attention backend,
    engine.
    """

    model: str
    dtype: str
    tokens_per_block: int
    rank: int = 0
    world_size: int = 1
    groups: tuple[WindowGroupSpec, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def single(
        cls,
        model: str,
        dtype: str,
        tokens_per_block: int,
        layers: int,
        kv_heads: int,
        head_size: int,
        kv_factor: int = 2,
    ) -> Self:
        """Returns a validated specification of one full-attention group with one pool."""
        pool = PoolSpec(layers=layers, kv_heads=kv_heads, head_size=head_size, kv_factor=kv_factor)
        spec = cls(model, dtype, tokens_per_block, groups=(WindowGroupSpec(pools=(pool,)),))
        spec.validate()
        return spec

    def validate(self) -> None:
        """Raises :class:`SpecError` naming the first field at fault."""
        _check_text("model", self.model)
        _check_dtype("dtype", self.dtype)
        require_int("tokens_per_block", self.tokens_per_block, 1, _MAX_TOKENS_PER_BLOCK, SpecError)
        require_int("world_size", self.world_size, 1, _MAX_WORLD_SIZE, SpecError)
        require_int("rank", self.rank, 0, self.world_size - 1, SpecError)
        require_all("groups", self.groups, WindowGroupSpec, SpecError)
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise SpecError("groups", len(self.groups), f"1 to {MAX_GROUPS} groups")
        for index, group in enumerate(self.groups):
            require_all(f"groups[{index}].pools", group.pools, PoolSpec, SpecError)
            self._validate_group(index, group)
        if len(self.identity) > _MAX_IDENTITY:
            raise SpecError("identity", f"{len(self.identity)} names", f"at most {_MAX_IDENTITY} names")
        for name, value in self.identity.items():
            for text in (name, value):
                _check_text(f"identity[{name}]", text)

    def _validate_group(self, index: int, group: WindowGroupSpec) -> None:
        where = f"groups[{index}]"
        require_int(f"{where}.window_tokens", group.window_tokens, 0, _MAX_WINDOW_TOKENS, SpecError)
        require_int(f"{where}.sink_tokens", group.sink_tokens, 0, _MAX_WINDOW_TOKENS, SpecError)
        if group.flat and group.window_tokens > 1:
            raise SpecError(f"{where}.flat", True, "False for a sliding window, which is one over a chain")
        if group.sink_tokens and not group.window_tokens:
            raise SpecError(f"{where}.sink_tokens", group.sink_tokens, "0 without a sliding window")
        if not 1 <= len(group.pools) <= MAX_POOLS:
            raise SpecError(f"{where}.pools", len(group.pools), f"1 to {MAX_POOLS} pools")
        for number, pool in enumerate(group.pools):
            limits = _OPAQUE_LIMITS if pool.block_bytes else _POOL_LIMITS
            for name, (low, high) in limits.items():
                require_int(f"{where}.pools[{number}].{name}", getattr(pool, name), low, high, SpecError)
            if pool.dtype != "":
                _check_dtype(f"{where}.pools[{number}].dtype", pool.dtype)
        if self.block_bytes(index) > MAX_BLOCK_BYTES:
            raise SpecError(where, self.block_bytes(index), f"at most {MAX_BLOCK_BYTES} bytes a block")

    def pool_bytes(self, group: int, pool: int) -> int:
        """Bytes of a block in a pool: layers x kv_factor x kv_heads x head_size x tokens_per_block x dtype bytes."""
        shape = self.groups[group].pools[pool]
        if shape.block_bytes:
            return shape.block_bytes
        values = shape.layers * shape.kv_factor * shape.kv_heads * shape.head_size * self.tokens_per_block
        return values * DTYPE_BYTES[shape.dtype or self.dtype]

    def block_bytes(self, group: int) -> int:
        """Bytes of one block: its parts in all pools, without padding."""
        return sum(self.pool_bytes(group, pool) for pool in range(len(self.groups[group].pools)))

    def attention(self, group: int) -> Attention:
        """Returns the window and the sinks of a group, in blocks."""
        shape = self.groups[group]
        return Attention.of(self.tokens_per_block, shape.window_tokens, shape.sink_tokens, flat=shape.flat)

    def splits(self, groups: Iterable[int]) -> bool:
        """Whether a sequence may end inside a block of these groups: one of full attention, none flat or of states."""
        windows = {-1 if self.groups[group].flat else self.groups[group].window_tokens for group in groups}
        return 0 in windows and windows.isdisjoint((-1, 1))

    def record_bytes(self, group: int) -> int:
        """Slot stride on host and disk: the parts, each padded to ``PAGE``, one after another."""
        return sum(padded(self.pool_bytes(group, pool)) for pool in range(len(self.groups[group].pools)))

    def fingerprint(self) -> bytes:
        """32 bytes; encoding in the module's docstring. Raises :class:`SpecError` for an invalid specification."""
        self.validate()
        return hashlib.sha256(b"".join(self._canonical())).digest()

    def _canonical(self) -> Iterator[bytes]:
        version = self._version()
        yield b"kvtier.cachespec"
        yield struct.pack("<I", version)
        yield from (_counted(self.model), _counted(self.dtype))
        yield struct.pack("<4I", self.tokens_per_block, self.rank, self.world_size, len(self.groups))
        for group in self.groups:
            yield struct.pack("<2I", group.window_tokens, len(group.pools))
            if version == _IDENTITY:
                yield struct.pack("<2I", group.flat, group.sink_tokens)
            for pool in group.pools:
                yield struct.pack("<4I", pool.layers, pool.kv_heads, pool.head_size, pool.kv_factor)
                if version != _ONE_DTYPE:
                    yield _counted(pool.dtype or self.dtype)
                if version == _IDENTITY:
                    yield struct.pack("<Q", pool.block_bytes)
        if version == _IDENTITY:
            yield struct.pack("<I", len(self.identity))
            for name, value in sorted(self.identity.items()):
                yield from (_counted(name), _counted(value))

    def _version(self) -> int:
        pools = [pool for group in self.groups for pool in group.pools]
        if self.identity or any(group.flat or group.sink_tokens for group in self.groups):
            return _IDENTITY
        if any(pool.block_bytes for pool in pools):
            return _IDENTITY
        return _ONE_DTYPE if all(pool.dtype in ("", self.dtype) for pool in pools) else _DTYPE_A_POOL

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` reads them back to an equal specification."""
        return asdict(self)

    @classmethod
    def of(cls, message: Any) -> Self:
        """Returns the specification in a message of the same fields, not yet validated."""
        groups = (
            WindowGroupSpec(
                group.window_tokens,
                tuple(
                    PoolSpec(p.layers, p.kv_heads, p.head_size, p.kv_factor, p.dtype, p.block_bytes)
                    for p in group.pools
                ),
                group.flat,
                group.sink_tokens,
            )
            for group in message.groups
        )
        fields = (message.model, message.dtype, message.tokens_per_block, message.rank, message.world_size)
        return cls(*fields, tuple(groups), dict(message.identity))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the validated specification. Raises :class:`SpecError` for unknown, missing or wrong fields."""
        try:
            groups = tuple(
                WindowGroupSpec(**{**group, "pools": tuple(PoolSpec(**pool) for pool in group["pools"])})
                for group in values["groups"]
            )
            spec = cls(**{**values, "groups": groups})
        except (KeyError, TypeError) as error:
            raise SpecError("spec", values, f"the fields of a specification: {error}") from error
        spec.validate()
        return spec


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value.encode()) <= _MAX_MODEL_BYTES:
        raise SpecError(field, value, f"1 to {_MAX_MODEL_BYTES} bytes of printable text")


def _check_dtype(field: str, value: str) -> None:
    if value not in DTYPE_BYTES:
        raise SpecError(field, value, f"one of {', '.join(DTYPE_BYTES)}")


def _counted(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
