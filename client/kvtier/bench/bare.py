"""A bare grpc.aio server in a process of its own: what an empty call costs without a daemon behind it.

``python -m kvtier.bench.bare PATH [BLOCK_BYTES]`` serves one method, which answers nothing, on a unix socket, prints
``ready``, and ends with its standard input. With a block size every line there is a JSON object of bytes a second by
edge: the copies that go on beside the server from then on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.bench.copies import Copies
from kvtier.errors import DaemonError

METHOD: Final = "Nothing"
SERVICE: Final = "kvtier.bench.Bare"
_READY: Final = b"ready\n"

Call = Callable[[], Awaitable[bytes]]


class BareServer:
    """``call`` is an empty one."""

    def __init__(self, call: Call, process: asyncio.subprocess.Process) -> None:
        self.call: Final = call
        self._process = process

    async def copies(self, rates: Mapping[str, float]) -> None:
        """Has so many bytes a second copied beside the server, by edge; none: nothing. Returns when it is so."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(rates)).encode() + b"\n")
        await _ready(self._process)


@asynccontextmanager
async def bare_server(directory: Path, block_bytes: int | None = None) -> AsyncIterator[BareServer]:
    """``directory``: for its socket and, with ``block_bytes``, for the file of its copies."""
    path = str(directory / "bare.sock")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtier.bench.bare", path, *([] if block_bytes is None else [str(block_bytes)])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _ready(process)
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            method: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
            yield BareServer(lambda: method(b""), process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    if await process.stdout.readline() != _READY:
        raise DaemonError("the bare server did not start", reason="BENCH")


async def _main(path: str, block_bytes: int | None) -> None:
    copies = Copies(Path(path).parent, block_bytes) if block_bytes is not None else None
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(_nothing)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say_ready()
    while line := await reader.readline():
        if copies is not None:
            await asyncio.to_thread(copies.start, json.loads(line))
        _say_ready()
    if copies is not None:
        copies.close()
    await server.stop(None)


def _say_ready() -> None:
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()


async def _nothing(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return b""


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None))
