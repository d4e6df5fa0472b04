"""transformers: keeps keys and values of prompts in kvtier from one ``generate`` to the next, in any process.

::

    store = PrefixStore("/run/kvtier", model)
    past, known = store.load_prefix(ids)
    sequences = model.generate(ids, **{store.argument: past})
    store.save_prefix(past, sequences)

The model extends ``past``, which :meth:`PrefixStore.save_prefix` therefore stores.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import cache_utils

from kvtier.abi.keys import KEY_BYTES, PLAIN, Scope
from kvtier.chains import Prompt
from kvtier.engine import Layout, PageGroup, PlaneLayout
from kvtier.engine.client import EngineClient
from kvtier.errors import DaemonUnavailable, InvalidArgument, KvtierError
from kvtier.memory.planes import Pages, Planes
from kvtier.retention import conversation_tag
from kvtier.sync import Client, SyncCache
from kvtier.types import BlockResult, CacheOptions, WritePolicy
from kvtier.verbs import Hint
from kvtier.wire import MAX_KEYS, Budgets

Ids: TypeAlias = "torch.Tensor | Sequence[int]"
"""The tokens of one prompt: [tokens] or [1, tokens]."""

_SUPPORTED: Final = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
)
"""Layers that keep keys and values and no other state."""
_SAMPLED: Final = 64
"""Values of each weight that go into the identity of a model."""
_PAUSE_S: Final = 30.0
"""Seconds between a failed save and the next attempt: each may wait for its whole timeout."""

log: Final = logging.getLogger("kvtier.connectors.transformers")


class PrefixStore:
    """The prefixes of one model in a kvtier cache of its own, whose name stands for model, dtype and attention.

    The constructor and the verbs raise only for invalid arguments. If kvtier fails, the store logs a warning, loads and
    saves nothing, and the model computes the missing tokens. A thread opens a cache that cannot be opened yet.
    """

    def __init__(
        self,
        client: Client | str | os.PathLike[str] | None,
        model: transformers.PreTrainedModel,
        *,
        tokens_per_block: int = 16,
        budgets: Budgets | None = None,
        timeout: float = 2.0,
    ) -> None:
        """Runs the model on one token, to learn the shapes that its layers keep.

        Args:
            client: or the daemon's address, None for the default: :meth:`close` then closes the store's own client.
            budgets: of a new cache, as in :meth:`kvtier.AsyncClient.open_cache`.
            timeout: seconds that a load or a save waits for the daemon.
        Raises: :class:`InvalidArgument`, also for a model whose layers keep anything but keys and values.
        """
        with torch.no_grad():
            done = model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True, return_dict=True)
        self.argument: Final = "cache" if "cache" in done else "past_key_values"
        """Name of the argument of ``generate`` and of the model that takes a cache. Versions name it differently."""
        self._samples: Final = [tensor[:, :, :0] for tensor in _tensors("model", done.get(self.argument))]
        """Keys and values of no token, of every layer in turn."""
        if len(devices := {str(sample.device) for sample in self._samples}) > 1:
            raise InvalidArgument("model", f"layers on {', '.join(sorted(devices))}", "on one device")
        self._tokens: Final = tokens_per_block
        self._timeout: Final = timeout
        self._save_from = 0.0
        self._budgets: Final = budgets
        self._spec: Final = (layout := self._layout(model)).spec
        self.name: Final = layout.cache()
        self.cache: SyncCache | None = None
        """None until the daemon has opened it."""
        given = client if isinstance(client, Client) else partial(Client, client)
        self._connection: Final = EngineClient(log, self.name, given)
        weakref.finalize(self, self._connection.closed.set)
        self._connection.open(self._open)

    def close(self) -> None:
        """Ends the attempts to open the cache, and the store's own client."""
        self._connection.close()

    def _open(self, client: Client) -> None:
        options = CacheOptions(write_policy=WritePolicy.THROUGH)
        self.cache = client.open_cache(self.name, self._spec, budgets=self._budgets, options=options)

    def load_prefix(self, ids: Ids, scope: Scope = PLAIN) -> tuple[transformers.DynamicCache, int]:
        """Loads the longest stored prefix of a prompt without its last token. Returns it and its number of tokens.

        Raises :class:`InvalidArgument`.
        """
        keys = Prompt(_flat(ids)[:-1], self._tokens, scope).keys
        past = transformers.DynamicCache()
        if (cache := self.cache) is None:
            return past, 0
        try:
            found = cache.prefix_length(keys, timeout=self._timeout)
            if cache.info.remote and found * KEY_BYTES < len(keys):
                found = max(found, cache.match(keys, remote=True, timeout=self._timeout).remote_blocks)
            if not found:
                return past, 0
            tensors = [
                sample.new_empty((1, sample.shape[1], found * self._tokens, sample.shape[3]))
                for sample in self._samples
            ]
            pages = self._pages(tensors, 0, found)
            known = len(cache.get(keys[: found * KEY_BYTES], pages, timeout=self._timeout)) * self._tokens
        except DaemonUnavailable as error:
            self._connection.begin(error)
            return past, 0
        except KvtierError as error:
            log.warning("no prefix is loaded: %s", error)
            return past, 0
        if known:
            for layer, (key_states, values) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
                past.update(key_states[:, :, :known], values[:, :, :known], layer)
        return past, known

    def save_prefix(self, past: transformers.Cache, ids: Ids, scope: Scope = PLAIN, conversation: str = "") -> int:
        """Stores the full blocks of a prompt that are not stored yet. Returns the number of its tokens stored now.

        Args:
            past: the model's keys and values of the prompt, after a prefill or after ``generate``.
            ids: tokens from the prompt's first one on; tokens that ``past`` does not hold are left out.
            conversation: the tag of the prompt's conversation: see :class:`kvtier.Hint`.
        Raises: :class:`InvalidArgument` for a ``past`` of several prompts or of another model, and for one without the
            first tokens, which a sliding window drops unless the model was given a ``DynamicCache()``.
        """
        tensors = _tensors("past", past)
        if list(map(_kind, tensors)) != list(map(_kind, self._samples)):
            raise InvalidArgument("past", f"{len(tensors) // 2} layers", f"of the model of cache {self.name}")
        prompt = Prompt(_flat(ids)[: int(past.get_seq_length())], self._tokens, scope)
        stored, count, tag = 0, len(prompt), conversation_tag(conversation)
        if (cache := self.cache) is None:
            return 0
        try:
            first_absent = cache.probe(prompt.keys, timeout=self._timeout).find(0)
            stored = count if first_absent < 0 else first_absent
            if stored < count and not self._connection.is_out and time.monotonic() >= self._save_from:
                stored += self._put(cache, prompt, tensors, stored, count)
            if tag and stored:
                cache.hint(Hint("reached", tag, prompt.keys[: MAX_KEYS * KEY_BYTES]), timeout=self._timeout)
        except DaemonUnavailable as error:
            self._connection.begin(error)
        except KvtierError as error:
            log.warning("no prefix is saved for %d s: %s", _PAUSE_S, error)
            self._save_from = time.monotonic() + _PAUSE_S
        return stored * self._tokens

    def _put(self, cache: SyncCache, prompt: Prompt, tensors: Sequence[torch.Tensor], first: int, last: int) -> int:
        """Stores blocks [first, last) of a prompt. Returns the number of stored blocks."""
        keys, parent = prompt.keys[first * KEY_BYTES :], prompt.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]
        pages = self._pages(tensors, first, last)
        results = cache.put(keys, pages, parent=parent or None, prompt=prompt, timeout=self._timeout)
        return sum(result is not BlockResult.PARENT_MISSING for result in results)

    def _pages(self, tensors: Sequence[torch.Tensor], first: int, last: int) -> Pages:
        """Returns blocks [first, last) of tensors [1, heads, tokens, size]; each head of a block is contiguous."""
        tokens = slice(first * self._tokens, last * self._tokens)
        heads = [head[tokens] for tensor in tensors for head in tensor.detach().contiguous()[0]]
        return Planes([head.view(last - first, -1) for head in heads])[range(last - first)]

    def _layout(self, model: transformers.PreTrainedModel) -> Layout:
        """Returns the layout. Its identity has every property that the bytes depend on."""
        config = model.config
        digest = hashlib.sha256(config.to_json_string().encode())
        for name, weight in model.named_parameters():
            if not weight.is_meta:  # a meta tensor stands for an offloaded part of the model
                values = weight.detach().reshape(-1)
                sample = values[:: max(1, len(values) // _SAMPLED)].contiguous().view(torch.uint8)
                digest.update(name.encode() + sample.cpu().numpy().tobytes())
        identity = {
            "engine": f"transformers {transformers.__version__}",
            "attention": str(config._attn_implementation),
            "dtype": str(self._samples[0].dtype),
            "model": digest.hexdigest(),
        }
        token_bytes = sum(each.shape[1] * each.shape[3] * each.element_size() for each in self._samples)
        group = PageGroup((PlaneLayout("all", self._tokens * token_bytes),))
        name = Path(config.name_or_path).name or config.model_type
        return Layout(name, self._tokens, (group,), identity=identity)


def _tensors(name: str, past: object) -> list[torch.Tensor]:
    """Returns keys and values of every layer in turn. Raises :class:`InvalidArgument`, which names the argument."""
    tensors: list[torch.Tensor] = []
    for number, layer in enumerate(getattr(past, "layers", ())):
        where = f"{name}.layers[{number}]"
        if type(layer) not in _SUPPORTED or layer.keys is None:
            raise InvalidArgument(where, type(layer).__name__, "a layer with keys and values and no other state")
        batch, _, kept, _ = layer.keys.shape
        if batch != 1:
            raise InvalidArgument(where, f"{batch} prompts", "of one prompt")
        if kept < (seen := int(layer.get_seq_length())):
            raise InvalidArgument(where, f"the last {kept} of {seen} tokens", "all of them, as in a DynamicCache()")
        tensors += (layer.keys, layer.values)
    if not tensors:
        raise InvalidArgument(name, type(past).__name__, "a decoder and its cache of keys and values")
    return tensors


def _kind(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """The heads, size and dtype of a layer's keys or values: [1, heads, tokens, size]."""
    return tensor.shape[1], tensor.shape[3], tensor.dtype


def _flat(ids: Ids) -> NDArray[np.integer[Any]]:
    tokens: NDArray[np.integer[Any]] = torch.as_tensor(ids).numpy(force=True)
    return tokens[0] if tokens.ndim == 2 and len(tokens) == 1 else tokens
