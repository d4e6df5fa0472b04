"""A prompt's blocks: their keys, and what a commit tells of them beside the keys."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.abi.errors import FieldError
from kvtier.abi.event_hashes import event_hashes
from kvtier.abi.keys import PLAIN, Scope, TokenIds, chain_keys, covered_blocks, extra_id_array, token_array
from kvtier.errors import InvalidArgument
from kvtier.options import CacheOptions
from kvtier.wire import split_keys


class Prompt:
    """The full blocks of a prompt; :attr:`keys` name them. Made by :meth:`kvtier.Cache.prompt`.

    Handed to ``put`` or ``commit`` beside some or all of these keys, it gives the cache what its options keep: event
    hashes, which are computed here, and token ids.
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
        self._tokens_per_block = tokens_per_block
        self._scope = scope
        self._salt_id = salt_id
        self._vocab_size = vocab_size
        self._place_of = {key: place for place, key in enumerate(split_keys(self.keys))}
        self._hashes: dict[str, bytes] = {}

    def __len__(self) -> int:
        """The number of full blocks."""
        return len(self._place_of)

    def told(self, keys: bytes, options: CacheOptions) -> dict[str, Any]:
        """Fields of a ``CommitRequest`` for packed keys of this prompt, as the options of the cache want them.

        Raises :class:`InvalidArgument` for a key of another prompt, or if a hash needs an argument that is missing.
        """
        try:
            places = [self._place_of[key] for key in split_keys(keys)]
        except KeyError as error:
            shown = f"without a block {error.args[0].hex()}"
            raise InvalidArgument("prompt", shown, "the one that the keys are of") from error
        fields: dict[str, Any] = {}
        if options.event_hash:
            packed = np.frombuffer(self._all_hashes(options.event_hash), np.uint8)
            fields["event_hashes"] = packed.reshape(len(self), -1)[places].tobytes()
        if options.keep_tokens:
            fields |= self._token_fields(places)
        return fields

    def _all_hashes(self, algorithm: str) -> bytes:
        if algorithm not in self._hashes:
            try:
                self._hashes[algorithm] = event_hashes(
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
        return self._hashes[algorithm]

    def _token_fields(self, places: list[int]) -> dict[str, Any]:
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
        fields["mm_digests"] = b"".join(item.digest for _, item in items)
        fields["mm_blocks"] = [number for number, _ in items]
        fields["mm_offsets"] = [item.offset for _, item in items]
        return fields
