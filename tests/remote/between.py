"""A proxy between a daemon and an S3 server, which a test has delay, withhold or replace what passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tests.integration.waiting import eventually

_CHUNK_BYTES: Final = 1 << 16


class Between:
    """``endpoint``: where a client reaches the server through it.

    ``passes``: cleared, nothing of what the server answers arrives. ``lies``: by the begin of a request, what it is
    answered instead. ``delay_s``: of each piece of an answer. Connections keep what they have when these change.
    """

    def __init__(self, endpoint: str, target_port: int) -> None:
        self.endpoint = endpoint
        self.passes = asyncio.Event()
        self.passes.set()
        self.lies: dict[bytes, bytes] = {}
        self.delay_s = 0.0
        self.withheld = 0
        """Answers that wait now."""
        self._target_port = target_port

    def heal(self) -> None:
        self.lies, self.delay_s = {}, 0.0
        self.passes.set()

    async def stuck(self) -> None:
        """Until an answer waits."""
        await eventually(lambda: self.withheld, bool)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._requests(reader, onward, writer))
                    group.create_task(self._answers(target, writer))
            finally:
                onward.close()
        except (OSError, ExceptionGroup):
            pass  # one of both has gone
        finally:
            writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            lie = next((lie for begin, lie in self.lies.items() if data.startswith(begin)), None)
            if lie is not None:
                back.write(lie)
                await back.drain()
                raise ConnectionAbortedError
            onward.write(data)
            await onward.drain()
        raise ConnectionAbortedError

    async def _answers(self, target: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await target.read(_CHUNK_BYTES):
            self.withheld += 1
            try:
                await asyncio.sleep(self.delay_s)
                await self.passes.wait()
            finally:
                self.withheld -= 1
            back.write(data)
            await back.drain()
        raise ConnectionAbortedError


@asynccontextmanager
async def between(target_port: int) -> AsyncIterator[Between]:
    served: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        served.add(task)
        task.add_done_callback(served.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy = Between(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", target_port)
    try:
        yield proxy
    finally:
        server.close()
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)
