"""LMCache's connector for vLLM, on the CPU.

vLLM looks for its kernels in every imported module, and asks each object there for its ``__dict__``. The library
of llvmlite, which LMCache imports, has none and answers with a function, on which vLLM fails.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi

_function_named = ffi._lib_wrapper.__getattr__


def _public_function(library: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _function_named(library, name)


ffi._lib_wrapper.__getattr__ = _public_function

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector  # noqa: E402, F401 – imports llvmlite
