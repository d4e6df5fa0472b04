"""An engine in the guest of systemd_vm.py: keeps one client over all that happens to the daemon.

Reads a JSON list a line, a verb and its arguments, does it, and answers each with a JSON object.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvtier
from kvtier.abi.keys import KEY_BYTES

CACHE: Final = "trial"
SPEC: Final = kvtier.CacheSpec.single("trial", "float16", tokens_per_block=16, layers=2, kv_heads=4, head_size=64)


def keys_of(name: str, count: int) -> list[bytes]:
    tokens = np.arange(count * SPEC.tokens_per_block, dtype=np.uint32)
    packed = kvtier.chain_keys(tokens, SPEC.tokens_per_block, kvtier.Scope(salt=name))
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


def block_of(key: bytes) -> NDArray[np.uint8]:
    """Bytes that follow from the key, and are no other key's."""
    generator = np.random.default_rng(np.frombuffer(key, dtype=np.uint32))
    return generator.integers(0, 256, SPEC.block_bytes(0), dtype=np.uint8)


class Engine:
    """The verbs. A name and a count stand for a chain of keys."""

    def __init__(self, client: kvtier.Client) -> None:
        self._client: Final = client
        self._cache: Final = client.open_cache(CACHE, SPEC)

    def put(self, name: str, count: int, tier: str) -> dict[str, Any]:
        """Stores a chain, and moves it on where it cannot be put at once."""
        keys = keys_of(name, count)
        self._cache.put(keys, [block_of(key) for key in keys], tier=kvtier.Tier.HOST)
        if tier != "host":
            self._cache.move(keys, kvtier.Tier[tier.upper()])
        return {"mapped": self._cache.mapped, "lookups": self._cache.lookups}

    def read(self, name: str, count: int) -> dict[str, Any]:
        """Where the chain's blocks are, and how many are right as this client reads them, and as a new one does."""
        keys = keys_of(name, count)
        with kvtier.Client() as fresh:
            other = fresh.open_cache(CACHE)
            residencies = {row.key: row.residency for row in other.blocks()}
            right = [sum(map(_is_right, keys, cache.get(keys))) for cache in (self._cache, other)]
        counts = {
            tier.name.lower(): sum(bool(residencies.get(key, 0) & tier.bit) for key in keys) for tier in kvtier.Tier
        }
        return {"right": min(right), "tiers": counts, "session": self._client.session_id}

    def about(self) -> dict[str, Any]:
        stats = self._client.stats()
        return {"version": stats.version, "pid": stats.pid, "boot": stats.boot, "epoch": stats.epoch}


def _is_right(key: bytes, found: NDArray[Any] | None) -> bool:
    return found is not None and np.array_equal(np.asarray(found).view(np.uint8).reshape(-1), block_of(key))


def answers(engine: Engine) -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        does: Callable[..., dict[str, Any]] = getattr(engine, verb)
        try:
            yield does(*arguments)
        except kvtier.KvtierError as error:
            yield {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    with kvtier.Client() as client:
        for answer in answers(Engine(client)):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
