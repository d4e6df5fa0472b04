"""A prompt's blocks: their keys, and what can be told of them when they are stored."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.abi.errors import FieldError
from kvtier.abi.event_hashes import event_hashes
from kvtier.abi.keys import PLAIN, Scope, TokenIds, chain_keys, covered_blocks, extra_id_array, token_array
from kvtier.errors import InvalidArgument
from kvtier.kinds import is_integer, quoted, require_kind
from kvtier.options import CacheOptions
from kvtier.wire import split_keys


def require_prompt(prompt: Prompt | None) -> None:
    """None: none is given. Raises :class:`InvalidArgument`."""
    if prompt is not None:
        require_kind("prompt", prompt, Prompt, "a prompt, as cache.prompt makes it")


class Prompt:
    """The full blocks of a prompt; :attr:`keys` name them. Made by :meth:`kvtier.Cache.prompt`.

    Handed to ``put`` or ``commit`` beside some or all of these keys, it lets the cache tell in events what its options
    say: hashes computed here, and the tokens themselves only where the cache keeps them.
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
    ) -> None:
        """See :meth:`kvtier.Cache.prompt`."""
        try:
            self.keys: Final = chain_keys(token_ids, tokens_per_block, scope, extra_ids)
            self._tokens = token_array(token_ids)
            self._extra_ids = None if extra_ids is None else extra_id_array(extra_ids, len(self._tokens))
        except FieldError as error:
            raise InvalidArgument(error.field, error.value, error.limit) from error
        for name, value in (("salt_id", salt_id), ("vocab_size", vocab_size)):
            if value is not None and not is_integer(value, 0, (1 << 64) - 1):
                raise InvalidArgument(name, quoted(value), "0 to 2^64 - 1")
        self._tokens_per_block = tokens_per_block
        self._scope = scope
        self._salt_id = salt_id
        self._vocab_size = vocab_size
        self._place_of = {key: place for place, key in enumerate(split_keys(self.keys))}
        self._hashes: dict[str, bytes] = {}

    def __len__(self) -> int:
        """Its full blocks."""
        return len(self._place_of)

    def told(self, keys: bytes, options: CacheOptions) -> dict[str, Any]:
        """Fields of a ``CommitRequest`` for packed keys of this prompt, as the options of the cache want them.

        Raises :class:`InvalidArgument` for a key of another prompt, and where a hash needs what is missing.
        """
        places = self._places(keys)
        fields: dict[str, Any] = {}
        if options.event_hash:
            fields["event_hashes"] = self._some_hashes(options.event_hash, places)
        if options.keep_tokens:
            fields |= self._some_tokens(places)
        return fields

    def _places(self, keys: bytes) -> list[int]:
        try:
            return [self._place_of[key] for key in split_keys(keys)]
        except KeyError as error:
            raise InvalidArgument(
                "prompt", f"without a block {error.args[0].hex()}", "the one that the keys are of"
            ) from error

    def _some_hashes(self, algorithm: str, places: list[int]) -> bytes:
        packed = self._hashes.get(algorithm)
        if packed is None:
            try:
                packed = self._hashes[algorithm] = event_hashes(
                    algorithm,
                    self._tokens,
                    self._tokens_per_block,
                    self._scope,
                    self._extra_ids,
                    salt_id=self._salt_id,
                    vocab_size=self._vocab_size,
                )
            except FieldError as error:
                raise InvalidArgument(error.field, error.value, error.limit) from error
        return np.frombuffer(packed, np.uint8).reshape(len(self), -1)[places].tobytes()

    def _some_tokens(self, places: list[int]) -> dict[str, Any]:
        blocks, width = len(self), self._tokens_per_block
        fields: dict[str, Any] = {"tokens": self._tokens[: blocks * width].reshape(blocks, width)[places].tobytes()}
        if self._extra_ids is not None:
            fields["token_extra_ids"] = self._extra_ids[: blocks * width].reshape(blocks, width)[places].tobytes()
        if self._scope.lora_id is not None:
            fields["lora_id"] = self._scope.lora_id
        if self._scope.salt is not None:
            fields["cache_salt"] = self._scope.salt
        covered = covered_blocks(self._scope, blocks, width)
        items = [(number, item) for number, place in enumerate(places) for item in covered.get(place, ())]
        if items:
            fields["mm_digests"] = b"".join(item.digest for _, item in items)
            fields["mm_blocks"] = [number for number, _ in items]
            fields["mm_offsets"] = [item.offset for _, item in items]
        return fields
