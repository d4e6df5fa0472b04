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


def _import_lazily(package: dict[str, _Any]) -> None:
    """Gives a package, by its globals, the names of its stub, each imported at its first use."""
    stub = _ast.parse(_Path(package["__file__"]).with_suffix(".pyi").read_text())
    modules = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, _ast.ImportFrom) for alias in node.names
    }

    def __getattr__(name: str) -> _Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = getattr(_importlib.import_module(modules[name]), name)
        package[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*modules, *(name for name in package if name.startswith("__"))})

    package |= {"__all__": list(modules), "__getattr__": __getattr__, "__dir__": __dir__}


_import_lazily(globals())
