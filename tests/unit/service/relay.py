"""A unix socket in front of a daemon's: what the daemon says on it, HTTP/2 frame by frame."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

HEADERS = 1
GOAWAY = 7
END_STREAM = 1


@dataclass
class Relay:
    """``said``: type, flags and stream of each whole frame, in the order in which they were written."""

    address: str
    said: list[tuple[int, int, int]] = field(default_factory=list)
    _rest: bytes = b""

    def last_words(self) -> list[int]:
        """Places in ``said`` of what ended a call."""
        return [place for place, (kind, flags, _) in enumerate(self.said) if kind == HEADERS and flags & END_STREAM]

    def farewells(self) -> list[int]:
        """Places in ``said`` of what announced the end of the connection."""
        return [place for place, (kind, _, _) in enumerate(self.said) if kind == GOAWAY]

    def heard(self, piece: bytes) -> None:
        self._rest += piece
        while len(self._rest) >= 9 and len(self._rest) >= (whole := 9 + int.from_bytes(self._rest[:3])):
            self.said.append((self._rest[3], self._rest[4], int.from_bytes(self._rest[5:9])))
            self._rest = self._rest[whole:]


@asynccontextmanager
async def relay(path: Path, target: str) -> AsyncIterator[Relay]:
    """``path``: where it listens. ``target``: the daemon's socket. For one connection."""
    through = Relay(f"unix:{path}")
    tasks: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, says: Relay | None) -> None:
        try:
            while piece := await source.read(1 << 16):
                if says is not None:
                    says.heard(piece)
                sink.write(piece)
                await sink.drain()
        except ConnectionError:
            pass  # the other side has closed: what it said was passed on
        finally:
            sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        daemon_reader, daemon_writer = await asyncio.open_unix_connection(target)
        tasks.add(asyncio.create_task(pump(reader, daemon_writer, None)))
        tasks.add(asyncio.create_task(pump(daemon_reader, writer, through)))

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield through
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
