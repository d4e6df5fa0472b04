"""What a cache's bytes mean: the specification, its sizes and its fingerprint.

Fingerprint, version 1: SHA-256 over, without padding, integers little-endian::

    16 bytes  b"kvtier.cachespec"
    u32       version = 1
    u32 + n   length of the model name in UTF-8, the name
    u32 + n   length of the dtype name, the name
    u32 x 4   tokens_per_block, rank, world_size, number of groups
    a group:  u32 window_tokens, u32 number of pools
    a pool:   u32 layers, u32 kv_heads, u32 head_size, u32 kv_factor

Two caches may exchange bytes only where their fingerprints are equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from kvtier.abi.errors import FieldError, require_int

PAGE: Final = 4096
"""Alignment of every part on host and disk: what direct I/O asks of addresses, offsets and lengths."""

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

FINGERPRINT_BYTES: Final = 32
MAX_BLOCK_BYTES: Final = 1 << 30
"""Largest block of a group, over all its pools."""

_FINGERPRINT_VERSION: Final = 1
_MAX_MODEL_BYTES: Final = 256
_MAX_POOLS: Final = 64
_POOL_LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "layers": (1, 4096),
    "kv_heads": (1, 4096),
    "head_size": (1, 65536),
    "kv_factor": (1, 2),
}
_MAX_TOKENS_PER_BLOCK: Final = 65536
_MAX_WORLD_SIZE: Final = 65536


class SpecError(FieldError):
    """A specification that kvtier does not accept: ``field``, ``value``, ``limit``."""


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``PAGE``."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(slots=True, frozen=True)
class PoolSpec:
    """KV of the layers that share one KV-head configuration. ``kv_factor`` 2 = keys and values, 1 = keys only (MLA)."""

    layers: int
    kv_heads: int
    head_size: int
    kv_factor: int = 2


@dataclass(slots=True, frozen=True)
class WindowGroupSpec:
    """All pools of one attention window size. ``window_tokens`` 0 = full attention."""

    window_tokens: int = 0
    pools: tuple[PoolSpec, ...] = ()


@dataclass(slots=True, frozen=True)
class CacheSpec:
    """What a cache's bytes mean. Sizes and fingerprint are defined for specifications that pass :meth:`validate`."""

    model: str
    dtype: str
    tokens_per_block: int
    rank: int = 0
    world_size: int = 1
    groups: tuple[WindowGroupSpec, ...] = ()

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
        """One full-attention group with one pool, validated."""
        pool = PoolSpec(layers=layers, kv_heads=kv_heads, head_size=head_size, kv_factor=kv_factor)
        spec = cls(model, dtype, tokens_per_block, groups=(WindowGroupSpec(pools=(pool,)),))
        spec.validate()
        return spec

    def validate(self) -> None:
        """Raises :class:`SpecError` naming the first field at fault."""
        _check_name("model", self.model, _MAX_MODEL_BYTES)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise SpecError("dtype", self.dtype, f"one of {', '.join(DTYPE_BYTES)}")
        require_int("tokens_per_block", self.tokens_per_block, 1, _MAX_TOKENS_PER_BLOCK, SpecError)
        require_int("world_size", self.world_size, 1, _MAX_WORLD_SIZE, SpecError)
        require_int("rank", self.rank, 0, self.world_size - 1, SpecError)
        if len(self.groups) != 1:
            raise SpecError("groups", len(self.groups), "exactly one group: this version has no window groups yet")
        for index, group in enumerate(self.groups):
            self._validate_group(index, group)

    def _validate_group(self, index: int, group: WindowGroupSpec) -> None:
        where = f"groups[{index}]"
        if group.window_tokens != 0:
            raise SpecError(f"{where}.window_tokens", group.window_tokens, "0: this version has full attention only")
        if not 1 <= len(group.pools) <= _MAX_POOLS:
            raise SpecError(f"{where}.pools", len(group.pools), f"1 to {_MAX_POOLS} pools")
        for number, pool in enumerate(group.pools):
            for name, (low, high) in _POOL_LIMITS.items():
                require_int(f"{where}.pools[{number}].{name}", getattr(pool, name), low, high, SpecError)
        if self.block_bytes(index) > MAX_BLOCK_BYTES:
            raise SpecError(where, self.block_bytes(index), f"at most {MAX_BLOCK_BYTES} bytes a block")

    def pool_bytes(self, group: int, pool: int) -> int:
        """Bytes of a block in a pool: layers x kv_factor x kv_heads x head_size x tokens_per_block x dtype bytes."""
        shape = self.groups[group].pools[pool]
        values = shape.layers * shape.kv_factor * shape.kv_heads * shape.head_size * self.tokens_per_block
        return values * DTYPE_BYTES[self.dtype]

    def block_bytes(self, group: int) -> int:
        """Bytes of one block: its parts in all pools, without padding."""
        return sum(self.pool_bytes(group, pool) for pool in range(len(self.groups[group].pools)))

    def record_bytes(self, group: int) -> int:
        """Slot stride on host and disk: the parts, each padded to ``PAGE``, one after another."""
        return sum(padded(self.pool_bytes(group, pool)) for pool in range(len(self.groups[group].pools)))

    def fingerprint(self) -> bytes:
        """32 bytes; encoding in the module's docstring. Raises :class:`SpecError` for an invalid specification."""
        self.validate()
        return hashlib.sha256(b"".join(self._canonical())).digest()

    def _canonical(self) -> Iterator[bytes]:
        yield b"kvtier.cachespec"
        yield struct.pack("<I", _FINGERPRINT_VERSION)
        for text in (self.model.encode(), self.dtype.encode()):
            yield struct.pack("<I", len(text)) + text
        yield struct.pack("<4I", self.tokens_per_block, self.rank, self.world_size, len(self.groups))
        for group in self.groups:
            yield struct.pack("<2I", group.window_tokens, len(group.pools))
            for pool in group.pools:
                yield struct.pack("<4I", pool.layers, pool.kv_heads, pool.head_size, pool.kv_factor)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` reads them back to an equal specification."""
        values: dict[str, Any] = asdict(self)
        values["groups"] = [
            {"window_tokens": group.window_tokens, "pools": [asdict(pool) for pool in group.pools]}
            for group in self.groups
        ]
        return values

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The validated specification. Raises :class:`SpecError` for unknown, missing or wrong fields."""
        top = _strict_fields("spec", values, cls)
        groups: list[WindowGroupSpec] = []
        for index, group_values in enumerate(_strict_list("groups", top["groups"])):
            where = f"groups[{index}]"
            group = _strict_fields(where, group_values, WindowGroupSpec)
            pools = _strict_list(f"{where}.pools", group["pools"])
            group["pools"] = tuple(
                PoolSpec(**_strict_fields(f"{where}.pools[{number}]", pool, PoolSpec))
                for number, pool in enumerate(pools)
            )
            groups.append(WindowGroupSpec(**group))
        top["groups"] = tuple(groups)
        spec = cls(**top)
        spec.validate()
        return spec


def _check_name(field: str, value: object, max_bytes: int) -> None:
    limit = f"1 to {max_bytes} bytes of printable text"
    if not isinstance(value, str) or not value.isprintable():
        raise SpecError(field, value, limit)
    if not 1 <= len(value.encode()) <= max_bytes:
        raise SpecError(field, value, limit)


def _strict_fields(where: str, values: object, cls: type[Any]) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    if not isinstance(values, dict) or set(values) != names:
        raise SpecError(where, values, f"an object with exactly the fields {', '.join(sorted(names))}")
    return dict(values)


def _strict_list(where: str, values: object) -> list[Any]:
    if not isinstance(values, list):
        raise SpecError(where, values, "a list")
    return values
