"""``kvtier put`` and ``get``: store and read the bytes of one block from a shell."""

from __future__ import annotations

import hashlib
import re
import sys
from typing import BinaryIO, Final

import click
import numpy as np

from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.spec import MAX_BLOCK_BYTES
from kvtier.cli.blocks import GROUP_OPTION, KeyType, whole_key
from kvtier.cli.common import DaemonAt, address_option, cache_argument
from kvtier.cli.options import command, output_option
from kvtier.cli.output import show
from kvtier.client import AsyncClient
from kvtier.errors import NotFound
from kvtier.types import BlockResult

_HEX: Final = re.compile(r"[0-9a-fA-F]{8,64}")


def named_key(text: str) -> bytes:
    """Converts a key or its beginning in hex, or any other text, whose SHA-256 is the key."""
    return KeyType().convert(text, None, None) if _HEX.fullmatch(text) else hashlib.sha256(text.encode()).digest()


@command()
@address_option
@cache_argument
@click.argument("key", type=named_key)
@click.argument("file", type=click.File("rb"), default="-")
@GROUP_OPTION
@output_option()
def put(daemon: DaemonAt, cache: str, key: bytes, file: BinaryIO, group: int, form: str) -> None:
    """Store a file, or standard input, as one block.

    KEY is 64 hexadecimal digits, or any text, whose SHA-256 is then the key. A file shorter than a block is filled up
    with zeros; a longer file is refused. A block never changes: exit status 1 if the key is stored already.
    """
    if len(key) != KEY_BYTES:
        raise click.UsageError(f"{key.hex()} is the beginning of a key: put takes 64 hexadecimal digits, or other text")
    if not (data := file.read(MAX_BLOCK_BYTES + 1)):
        raise click.UsageError(f"FILE is empty. A file is the third argument: kvtier put {cache} KEY FILE")

    async def stored(client: AsyncClient) -> tuple[BlockResult, int]:
        at = (await client.open_cache(cache)).in_group(group)
        if len(data) > at.block_bytes:
            raise click.ClickException(f"{file.name} has more than {at.block_bytes} bytes, a block of {cache}")
        block = np.zeros(at.block_bytes, np.uint8)
        block[: len(data)] = np.frombuffer(data, np.uint8)
        (result,) = await at.put([key], [block])
        return result, at.block_bytes

    result, block_bytes = daemon.ask(stored)
    value = {"cache": cache, "key": key.hex(), "result": str(result), "bytes": len(data), "block_bytes": block_bytes}
    show(form, value, f"{key.hex()}  {result}, {len(data)} of {block_bytes} bytes")
    if result is not BlockResult.OK:
        raise SystemExit(1)


@command()
@address_option
@cache_argument
@click.argument("key", type=named_key)
@GROUP_OPTION
def get(daemon: DaemonAt, cache: str, key: bytes, group: int) -> None:
    """Write the bytes of a block to standard output.

    KEY is 64 hexadecimal digits or the first 8 or more, or the text that `kvtier put` was given. The whole block is
    written, with the zeros that put added.
    """

    if sys.stdout.isatty():
        raise click.UsageError("standard output is a terminal: add > FILE, or a pipe")

    async def found(client: AsyncClient) -> bytes:
        at = (await client.open_cache(cache, write=False)).in_group(group)
        wanted = await whole_key(client, cache, key)
        blocks = await at.get([wanted], verify=True)
        if not blocks:
            raise NotFound(f"block {wanted.hex()} of {cache} is not stored", reason="UNKNOWN_KEY")
        return bytes(blocks[0])

    sys.stdout.buffer.write(daemon.ask(found))
    sys.stdout.flush()
