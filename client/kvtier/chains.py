"""The longest prefix that every window group can serve, from any source of residencies.

This prefix has the largest n for which every full-attention group holds blocks [0, n), and every group of a sliding
window of w tokens holds its sinks and the blocks that cover tokens [max(0, n * tokens_per_block - w), n *
tokens_per_block). A minimum of separate matches would be wrong: a longer prefix may be served where a shorter one is
not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier import buffers
from kvtier.abi.attention import Attention, Needed
from kvtier.abi.event_hashes import event_hashes
from kvtier.abi.key_index import IndexEntries, IndexReader
from kvtier.abi.keys import KEY_BYTES, PLAIN, Scope, TokenIds, chain_keys, covered_blocks, extra_id_array, token_array
from kvtier.abi.spec import CacheSpec
from kvtier.buffers import Rows
from kvtier.errors import InvalidArgument, require_kind
from kvtier.retention import BlockRetention
from kvtier.types import ROOT_PARENT, CacheOptions, Cursor, Tier
from kvtier.v1 import blocks_pb2
from kvtier.wire import GroupSpan, Location, Match, locations, packed_keys, split_keys


def longest(bound: int, sides: Iterable[tuple[Attention, NDArray[np.bool_]]]) -> int:
    """Returns the longest prefix of at most ``bound`` blocks for which every group has the blocks that it needs. Each
    side: a group's attention, and whether it has each of the first ``bound`` blocks."""
    served, lengths = np.ones(bound + 1, np.bool_), np.arange(bound + 1)
    for attention, there in sides:
        holes = np.concatenate(([0], np.cumsum(~there)))
        first = np.maximum(0, lengths - (attention.span or bound))
        served &= (holes == holes[first]) & (holes[np.minimum(first, attention.sinks)] == 0)
    return int(np.flatnonzero(served)[-1])


class Prompt:
    """The blocks of a prompt; :attr:`keys` name them. Made by :meth:`kvtier.Cache.prompt`.

    Passed to ``put`` or ``commit`` beside some or all of these keys, a prompt gives the cache the data that its options
    keep: event hashes, computed here, and token ids.
    """

    def __init__(
        self,
        token_ids: TokenIds,
        tokens_per_block: int,
        scope: Scope = PLAIN,
        extra_ids: TokenIds | None = None,
        *,
        salt_id: int | None = None,
        vocab_size: int | None = None,
        partial: bool = False,
    ) -> None:
        """See :meth:`kvtier.Cache.prompt`."""
        self.keys: Final = chain_keys(token_ids, tokens_per_block, scope, extra_ids, partial=partial)
        self._tokens = token_array(token_ids)
        self._extra_ids = None if extra_ids is None else extra_id_array(extra_ids, len(self._tokens))
        self.scope: Final = scope
        self.partial_tokens: Final = len(self._tokens) % tokens_per_block if partial else 0
        """Number of tokens of a partial last block; 0 = all blocks are full."""
        self._tokens_per_block = tokens_per_block
        self._salt_id = salt_id
        self._vocab_size = vocab_size
        self._place_of = {key: place for place, key in enumerate(split_keys(self.keys))}
        self._hashes: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._place_of)

    def __repr__(self) -> str:
        return f"<prompt of {len(self._tokens)} tokens: {len(self)} blocks>"

    def parent_of(self, key: bytes) -> bytes | None:
        """The key before this one; None if the key is the first, or of another prompt."""
        place = self._place_of.get(key, 0)
        return self.keys[(place - 1) * KEY_BYTES : place * KEY_BYTES] if place else None

    def tokens(self, blocks: int) -> int:
        """Number of tokens of the first ``blocks`` blocks."""
        return min(blocks * self._tokens_per_block, len(self._tokens))

    def following(self, blocks: int) -> bytes:
        """The token ids after the first ``blocks`` blocks, u32 each: fewer than a block, and only up to the first token
        that has an extra id or belongs to an item."""
        start = blocks * self._tokens_per_block
        end = start + self._tokens_per_block - 1
        items = covered_blocks(self.scope, len(self._tokens), self._tokens_per_block).get(blocks, ())
        ends = [start + item.position for item in items]
        if self._extra_ids is not None:
            ends += (start + np.flatnonzero(self._extra_ids[start:end])).tolist()
        return self._tokens[start : min([end, *ends])].tobytes()

    def told(self, keys: bytes, options: CacheOptions) -> dict[str, Any]:
        """The fields of a ``CommitRequest`` for packed keys of this prompt, as the cache's options require.

        Raises :class:`InvalidArgument` for a key of another prompt, for a key after the partial block's, or if a hash
        lacks an argument.
        """
        try:
            places = [self._place_of[key] for key in split_keys(keys)]
        except KeyError as error:
            shown = f"without a block {error.args[0].hex()}"
            raise InvalidArgument("prompt", shown, "the one that the keys are of") from None
        fields: dict[str, Any] = {}
        if options.event_hash:
            packed = np.frombuffer(self._all_hashes(options.event_hash), np.uint8)
            fields["event_hashes"] = packed.reshape(len(self), -1)[places].tobytes()
        if options.keep_tokens:
            fields |= self._token_fields(places)
        return fields

    def _all_hashes(self, algorithm: str) -> bytes:
        if algorithm not in self._hashes:
            self._hashes[algorithm] = event_hashes(
                algorithm,
                self._tokens,
                self._tokens_per_block,
                self.scope,
                self._extra_ids,
                salt_id=self._salt_id,
                vocab_size=self._vocab_size,
                partial=self.partial_tokens > 0,
            )
        return self._hashes[algorithm]

    def _token_fields(self, places: list[int]) -> dict[str, Any]:
        scope, count = self.scope, self.tokens(len(self))
        fields: dict[str, Any] = {"tokens": self._rows(self._tokens[:count], places)}
        if self._extra_ids is not None:
            fields["token_extra_ids"] = self._rows(self._extra_ids[:count], places)
        if self.partial_tokens and len(self) - 1 in places:
            if places[-1] != len(self) - 1:
                raise InvalidArgument("keys", "a key after that of the partial block", "that one last")
            fields["partial_tokens"] = self.partial_tokens
        if scope.lora_id is not None:
            fields["lora_id"] = scope.lora_id
        if scope.salt is not None:
            fields["cache_salt"] = scope.salt
        covered = covered_blocks(scope, count, self._tokens_per_block)
        items = [(number, item) for number, place in enumerate(places) for item in covered.get(place, ())]
        fields["mm_digests"] = b"".join(item.digest for _, item in items)
        fields["mm_blocks"] = [number for number, _ in items]
        fields["mm_offsets"] = [item.offset for _, item in items]
        return fields

    def _rows(self, values: NDArray[Any], places: Iterable[int]) -> bytes:
        width = self._tokens_per_block
        return b"".join([values[place * width : (place + 1) * width].tobytes() for place in places])


_TRIES: Final = 3
"""Attempts at a match whose blocks leave meanwhile."""


class Telling(Protocol):
    """The prompt of the keys."""

    def told(self, keys: bytes, options: CacheOptions) -> dict[str, Any]: ...
    def parent_of(self, key: bytes) -> bytes | None: ...


@dataclass(slots=True, frozen=True)
class ChainPart:
    """A chain, or some of its keys, to be stored. All fields but ``prompt`` have one item per key. ``blocks`` has none
    if slots have the bytes."""

    chain: Sequence[bytes]
    blocks: Rows
    parents: Sequence[bytes]
    kept: BlockRetention
    prompt: Telling | None

    @classmethod
    def whole(
        cls, chain: Sequence[bytes], blocks: Rows, parent: bytes | None, kept: BlockRetention, prompt: Prompt | None
    ) -> ChainPart:
        """Makes the part of a chain's last keys, one per block. ``parent``: of the chain's first key; None: the
        prompt's, else the block is a root. ``kept``: of all keys. Raises :class:`kvtier.errors.InvalidArgument`."""
        require_kind("prompt", prompt, Prompt, type(None))
        before = len(chain) - len(blocks)
        if before:
            chain, parent, kept = chain[before:], chain[before - 1], kept.only(range(before, len(chain)))
        return cls(chain, blocks, parents_of(chain, parent, None, prompt), kept, prompt)

    def only(self, places: Sequence[int]) -> ChainPart:
        """The part of these ascending places."""
        if len(places) == len(self.chain):
            return self
        return ChainPart(
            [self.chain[place] for place in places],
            buffers.picked(self.blocks, np.array(places, np.intp)),
            [self.parents[place] for place in places],
            self.kept.only(places),
            self.prompt,
        )

    def commit(self, options: CacheOptions, **more: Any) -> blocks_pb2.CommitRequest:
        """The request to commit the part. ``more``: further fields."""
        keys = b"".join(self.chain)
        return blocks_pb2.CommitRequest(
            keys=keys,
            parents=b"".join(self.parents),
            priorities=self.kept.priorities,
            durations_ms=self.kept.durations_ms,
            conversation=self.kept.conversation,
            **(self.prompt.told(keys, options) if self.prompt is not None and keys else {}),
            **more,
        )


def parents_of(
    chain: Sequence[bytes], parent: bytes | None, parents: Sequence[bytes | None] | None, prompt: Telling | None
) -> list[bytes]:
    """The parents of a chain's keys: ``parents``, one per key; else the first key has ``parent``, or the prompt's, or
    is a root. Raises :class:`kvtier.errors.InvalidArgument`."""
    if prompt is not None and not hasattr(prompt, "told"):
        raise InvalidArgument("prompt", repr(prompt), "made by Cache.prompt")
    if parents is not None:
        return split_keys(packed_keys([ROOT_PARENT if each is None else each for each in parents], "parents"))
    if parent is None and prompt is not None and chain:
        parent = prompt.parent_of(chain[0])
    first = split_keys(packed_keys([ROOT_PARENT if parent is None else parent], "parent"))
    return [*first, *chain][: len(chain)]


class Chains:
    """Lookups of one mapped cache; ``keys`` are packed. Thread-safe. ``as_of`` of an answer is an event that the index
    showed before the lookup began."""

    def __init__(self, index: IndexReader, spec: CacheSpec, only: Sequence[Tier] | None = None) -> None:
        """``only``: count only blocks in one of these tiers, and take uncertain ones for absent. None: count blocks in
        any tier."""
        self._index: Final = index
        self._bits: Final = None if only is None else np.uint8(sum(tier.bit for tier in only))
        self.attentions: Final = [spec.attention(group) for group in range(len(spec.groups))]
        """Attention of each group: the blocks that it needs of a sequence."""
        self.block_bytes: Final = [spec.block_bytes(group) for group in range(len(spec.groups))]

    def find(self, keys: bytes, group: int) -> IndexEntries:
        """Finds blocks, with residencies in the tiers that count."""
        found = self._index.find(keys, group)
        if self._bits is None:
            return found
        return replace(found, residency=found.residency & self._bits, sure=np.ones_like(found.sure))

    def prefix_length(self, keys: bytes, groups: Sequence[int]) -> int | None:
        """The longest prefix of the chain that these groups can serve together."""
        walked = self._walk(keys, groups)
        return None if walked is None else walked[0]

    def _walk(self, keys: bytes, groups: Sequence[int]) -> tuple[int, dict[int, NDArray[np.uint8]]] | None:
        """The longest prefix, and the residencies that it needs in the groups where they are known."""
        bound, others = len(keys) // KEY_BYTES, list[int]()
        for group in groups:
            if self._bits is not None or not self.attentions[group].chained:
                others.append(group)
            elif (length := self._index.prefix_length(keys[: bound * KEY_BYTES], group)) is None:
                return None
            else:
                bound = length
        known = {group: self._needed(keys, group, bound) for group in others}
        if all(residency.all() for residency in known.values()):
            return bound, known
        found = [(self.attentions[group], self.find(keys[: bound * KEY_BYTES], group)) for group in others]
        length = longest(bound, ((attention, each.residency != 0) for attention, each in found))
        most = longest(bound, ((attention, (each.residency != 0) | ~each.sure) for attention, each in found))
        return (length, {}) if length == most else None

    def match(self, keys: bytes, groups: Sequence[int]) -> Match | None:
        for _ in range(_TRIES):
            as_of = Cursor(*self._index.shown())
            walked = self._walk(keys, groups)
            if walked is None:
                return None
            length, known = walked
            spans = tuple(
                GroupSpan(group, needed.first, residency.tobytes(), needed.sinks)
                for group in groups
                for needed in [self.attentions[group].needs(length)]
                for residency in [known[group] if group in known else self._needed(keys, group, length)]
            )
            if all(0 not in span.residency for span in spans):  # else a block has left meanwhile
                return Match(length, spans, as_of)
        return None

    def _needed(self, keys: bytes, group: int, length: int) -> NDArray[np.uint8]:
        """The residencies of the blocks that a prefix of ``length`` blocks needs in a group."""
        return self.find(self.attentions[group].needs(length).cut(keys, KEY_BYTES), group).residency

    def wanted(self, keys: bytes, group: int) -> Needed | None:
        """The blocks of a chain to copy: in a full-attention group all that are there, else the needs of the longest
        prefix. None if that is uncertain."""
        attention = self.attentions[group]
        length = self.prefix_length(keys, [group]) if attention.span else len(keys) // KEY_BYTES
        return None if length is None else attention.needs(length)

    def probe(self, keys: bytes, group: int) -> bytes | None:
        found = self.find(keys, group)
        return found.residency.tobytes() if found.sure.all() else None

    def locate(self, keys: bytes, group: int) -> list[Location] | None:
        found = self.find(keys, group)
        places = found.device_slots, found.device_generations, found.host_slots, found.host_generations
        if not found.sure.all():
            return None
        return locations(found.residency.tolist(), *(column.tolist() for column in places))


def count_leading(wanted: NDArray[np.bool_]) -> int:
    end = int(wanted.argmin()) if len(wanted) else 0
    return len(wanted) if not len(wanted) or wanted[end] else end


MOST_CHAINS: Final = 256
"""Number of last looked-up, not yet read chains that are remembered."""


class Asked:
    """The chains asked of one cache, as packed keys. Thread-safe."""

    def __init__(self) -> None:
        self.muted = False
        """Whether nothing counts: another process of the engine asks the same questions."""
        self._lock: Final = threading.Lock()
        self._found: Final[dict[bytes, tuple[bytes, int]]] = {}
        """Maps the last key of a chain to the chain and the number of its blocks that were found."""

    def looked_up(self, chain: bytes, found: int) -> bool:
        """Notes a lookup. Returns whether it is a new question: a repeated lookup with the same answer is not."""
        end = chain[-KEY_BYTES:]
        with self._lock:
            before = self._found.pop(end, None)
            self._found[end] = chain, found
            if len(self._found) > MOST_CHAINS:
                del self._found[next(iter(self._found))]
        return not self.muted and (before is None or before[1] != found)

    def read(self, chain: bytes) -> bool:
        """Notes a read. Returns whether it is a new question: no lookup of the chain, or of a longer chain that begins
        with it, came before. A read uses up its lookup; the next read is a question of its own."""
        with self._lock:
            if self.muted or self._found.pop(chain[-KEY_BYTES:], None) is not None:
                return False
            for end, (whole, _) in reversed(self._found.items()):
                if whole.startswith(chain):
                    del self._found[end]
                    return False
        return True

    def stored(self, chain: bytes) -> None:
        """Notes that the end of a chain was stored: the next lookup of it is a new question."""
        with self._lock:
            self._found.pop(chain[-KEY_BYTES:], None)
