"""Which blocks a command is about: keys on the command line, from a file, or all of a cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TextIO, TypeVar

import click

from kvtier.abi.keys import KEY_BYTES
from kvtier.cache import Cache

Command = TypeVar("Command", bound=Callable[..., Any])

PIECE: Final = 256
"""Keys of one call: each of them gets its slots in one step, so a piece must be small beside any tier worth having."""


class KeyType(click.ParamType[bytes]):
    """A block key in hex, or its beginning of at least ``shortest`` bytes."""

    name = "key"

    def __init__(self, shortest: int = KEY_BYTES) -> None:
        self.shortest = shortest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            key = bytes.fromhex(value)
        except ValueError:
            key = b""
        if not self.shortest <= len(key) <= KEY_BYTES:
            digits = f"{2 * self.shortest} to {2 * KEY_BYTES}" if self.shortest < KEY_BYTES else f"{2 * KEY_BYTES}"
            self.fail(f"{value!r} is not a key: {digits} hexadecimal digits, an even number", param, ctx)
        return key


@dataclass(slots=True, frozen=True)
class Selection:
    """Keys in the order given, each once; None = all of the cache."""

    keys: tuple[bytes, ...] | None

    async def pieces(self, cache: Cache) -> AsyncIterator[list[bytes]]:
        """Of :data:`PIECE` keys at most. All of a cache are those of a listing made before anything is changed."""
        keys = [block.key async for block in cache.blocks()] if self.keys is None else self.keys
        for piece in _pieces(keys):
            yield piece


def keys_arguments(command: Command) -> Command:
    """``[KEY]...`` and ``--from``."""
    command = click.option(
        "--from", "source", type=click.File(), metavar="FILE", help="Keys from a file, one a line; - is standard input."
    )(command)
    return click.argument("keys", nargs=-1, type=KeyType(), metavar="[KEY]...")(command)


def selection(keys: Sequence[bytes], source: TextIO | None, everything: bool = False) -> Selection:
    """What was given, by exactly one of the ways there are. Raises :class:`click.UsageError`."""
    if bool(keys) + (source is not None) + everything != 1:
        raise click.UsageError("name the blocks in one way: KEYs, --from, or --all where the command has it")
    if everything:
        return Selection(None)
    found = tuple(dict.fromkeys(keys if source is None else _read(source)))
    if not found:
        raise click.UsageError("there is no key in the file")
    return Selection(found)


def _read(source: TextIO) -> Iterator[bytes]:
    for number, line in enumerate(source, 1):
        if text := line.strip():
            try:
                yield KeyType().convert(text, None, None)
            except click.BadParameter as error:
                raise click.UsageError(f"{source.name}, line {number}: {error.message}") from error


def _pieces(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(keys)
    while piece := list(islice(left, PIECE)):
        yield piece
