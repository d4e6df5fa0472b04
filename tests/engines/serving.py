"""Engines in processes that are not forked from a template, and servers, as a page of the documentation starts them."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.engines.engines import ROOT, Engine, environment

START_S: Final = 150.0
_END_S: Final = 20.0
_PAGE: Final = ROOT / "docs/engines.md"


def command_of_the_page(program: str) -> list[str]:
    """The words of the one command of the page that begins so."""
    (text,) = re.findall(
        rf"^```sh engines\n({re.escape(program)} .*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return shlex.split(text.replace("\\\n", ""))


def changed(words: Sequence[str], option: str, change: Mapping[str, Any], *path: str) -> list[str]:
    """The words with more in the JSON object that follows an option, or in one within it."""
    at = words.index(option) + 1
    value = json.loads(words[at])
    within = value
    for name in path:
        within = within.setdefault(name, {})
    within.update(change)
    return [*words[:at], json.dumps(value), *words[at + 1 :]]


@contextmanager
def running(words: Sequence[Any], log: Path, variables: Mapping[str, str]) -> Iterator[Engine]:
    """An engine that a runner runs, told what to do over its standard input."""
    their_input, commands = os.pipe()
    replies, their_output = os.pipe()
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdin=their_input,
            stdout=their_output,
            stderr=output,
            env={**environment(), **variables},
            start_new_session=True,
        )
    os.close(their_input)
    os.close(their_output)
    with process, Engine(process.pid, commands, replies, log) as engine:
        yield engine


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


@contextmanager
def serving(words: Sequence[Any], variables: Mapping[str, str], ready: str) -> Iterator[str]:
    """What a server wrote until it said that it is ready. It is ended with the block, in the end by SIGKILL."""
    said: list[str] = []
    heard = threading.Event()
    with subprocess.Popen(
        words,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        start_new_session=True,
    ) as server:

        def listen() -> None:
            assert server.stdout is not None
            for line in server.stdout:
                said.append(line)
                if ready in line:
                    heard.set()
            heard.set()

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            assert heard.wait(START_S), "".join(said)
            assert any(ready in line for line in said), "".join(said)
            yield "".join(said)
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(_END_S)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            listener.join()
