"""A bare grpc.aio server in a process of its own: what an empty call costs without a daemon behind it.

``python -m kvtier.bench.bare PATH`` serves one method, which answers nothing, on a unix socket, prints ``ready``, and
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

METHOD: Final = "Nothing"
SERVICE: Final = "kvtier.bench.Bare"

Call = Callable[[], Awaitable[bytes]]


async def serve(path: str, *, until: Awaitable[Any]) -> None:
    async def nothing(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return b""

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(nothing)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await until
    await server.stop(None)


@asynccontextmanager
async def bare_call(directory: Path, *arguments: str) -> AsyncIterator[Call]:
    """Starts the server and yields an empty call of it. ``arguments``: more of its command line."""
    path = str(directory / "bare.sock")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtier.bench.bare", path, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the bare server did not start")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            method: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
            yield lambda: method(b"")
    finally:
        process.stdin.close()
        await process.wait()


async def _main(path: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(path, until=reader.read())


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
