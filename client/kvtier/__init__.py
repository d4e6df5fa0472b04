"""kvtier: client of the daemon that keeps LLM engines' KV cache in tiers of GPU, CPU and disk memory.

    async with kvtier.connect() as client:
        cache = await client.open_cache("llama", spec)
        keys = kvtier.chain_keys(token_ids, spec.tokens_per_block)
        await cache.put(keys, blocks)
        blocks = await cache.get(keys)

    with kvtier.Client() as client:  # the same without an event loop
        cache = client.open_cache("llama", spec)

``dir(kvtier)`` lists the public names, and docs/api.md has a line for each. A name is imported at its first use:
``import kvtier.abi`` costs no gRPC.
"""

from __future__ import annotations

import ast as _ast
import importlib as _importlib
from pathlib import Path as _Path
from typing import Any as _Any

_STUB = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, _ast.ImportFrom) for alias in node.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
