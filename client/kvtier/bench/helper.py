"""Processes beside a benchmark's own, asked and answering in lines of JSON: what they do is not felt by who measures.

A helper is a module that ends with ``serve(handler)`` and is run with ``helping(module, ...)``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from kvtier.errors import DaemonError

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_LINE_BYTES: Final = 1 << 28


class Helper:
    """One such process. One question at a time."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module = module
        self._process = process

    async def ask(self, **question: Any) -> dict[str, Any]:
        """Raises :class:`DaemonError` where the process has ended instead; it has told why on standard error."""
        if self._process.stdin is None or self._process.stdout is None:
            raise DaemonError(f"{self._module} has no pipes", reason="BENCH")
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise DaemonError(f"{self._module} has ended", reason="BENCH")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def helping(module: str, *arguments: str) -> AsyncIterator[Helper]:
    """``python -m module arguments``; killed at the end, whatever it does then."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    try:
        yield Helper(module, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def serve(handler: Handler) -> None:
    """Answers the questions of standard input, one after another, until its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await handler(json.loads(line))), flush=True)
