"""Engines in processes of their own, run by the Python of the engines' environment and told what to do line by line."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 150.0
"""An engine imports gigabytes on a machine that is busy with other things."""
ANSWER_S: Final = 90.0
ROUNDING: Final = 1e-4
"""An engine's batches follow the machine's load, and a batch's shape changes a log probability by some 1e-6."""
_OFFLINE: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(*packages: Path) -> dict[str, str]:
    """Of an engine: with this tree's kvtier, whatever its own has, and without a network.

    ``packages``: folders with more of them.
    """
    paths = [*(ROOT / part for part in ("client", "daemon", "")), *packages]
    return {**os.environ, **_OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, paths))}


@dataclass(slots=True, frozen=True)
class Completion:
    """What an engine made of a prompt. ``cached``: prompt tokens that it did not compute."""

    tokens: tuple[int, ...]
    logprobs: Any
    cached: int
    first_s: float
    params: Any = None
    """Transfer parameters of the answer."""

    def same(self, other: Completion) -> bool:
        """The tokens are equal, and the log probabilities but for the rounding of another batch."""
        return self.tokens == other.tokens and _close(self.logprobs, other.logprobs)


def _close(one: Any, other: Any) -> bool:
    """Whether two nested lists differ in floats only, each by ``ROUNDING`` at most."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= ROUNDING
    return bool(one == other)


@dataclass(slots=True, frozen=True)
class Answer:
    """``external``: prompt tokens that came from kvtier since the engine started. ``held_s``: how long after the last
    token a request's pages were held."""

    completions: tuple[Completion, ...]
    external: int
    seconds: float
    held_s: float

    @property
    def cached(self) -> list[int]:
        return [completion.cached for completion in self.completions]


class Template:
    """A process that has imported an engine, from which engines are forked. ``within``: a command that becomes it."""

    def __init__(self, python: Path, runner: str, log: Path, *packages: Path, within: Sequence[str] = ()) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*within, python, str(ROOT / "tests/engines" / runner)],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env=environment(*packages),
            )

    def start(self, arguments: Mapping[str, Any], log: Path, variables: Mapping[str, str]) -> Engine:
        told = json.dumps({"arguments": arguments, "variables": dict(variables)}).encode()
        their_input, commands = os.pipe()
        replies, their_output = os.pipe()
        theirs = (their_input, their_output, os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY))
        socket.send_fds(self._requests, [told], theirs)
        for file in theirs:
            os.close(file)
        self._requests.settimeout(START_S)
        return Engine(int(self._requests.recv(64)), commands, replies, log)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(ANSWER_S)


def assert_same(found: Answer, expected: Answer) -> None:
    for number, (one, other) in enumerate(zip(found.completions, expected.completions, strict=True)):
        assert one.same(other), f"prompt {number}: {one}\n{other}"


class Engine:
    """A running engine. ``log``: what it writes."""

    def __init__(self, pid: int, commands: int, replies: int, log: Path) -> None:
        self.pid = pid
        self._commands = commands
        self._replies = replies
        self._log = log
        self._end = os.pidfd_open(pid)
        self._rest = b""
        try:
            assert self._line(START_S) == {"ready": True}, self.log
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int] = 8, **more: Any) -> Answer:
        """Greedily; one prompt after the other, so that batches and thus log-probabilities are the same each time."""
        self.begin(prompts, tokens, **more)
        return self.answer()

    def begin(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int] = 8, **more: Any) -> None:
        """Returns while it generates; :meth:`answer` waits for the end."""
        self._say({"prompts": [list(prompt) for prompt in prompts], "tokens": tokens, **more})

    def reach(self, step: int) -> None:
        """Waits for a step of a generation that was begun with ``tell``."""
        while self._line(ANSWER_S)["step"] < step:
            pass

    def answer(self) -> Answer:
        while "step" in (message := self._line(ANSWER_S)):
            pass
        completions = tuple(
            Completion(tuple(told["tokens"]), told["logprobs"], told["cached"], told["first_s"], told.get("params"))
            for told in message["outputs"]
        )
        return Answer(completions, message["external"], message["seconds"], message["held_s"])

    def forget(self) -> None:
        """Empties the engine's own prefix cache, not kvtier's."""
        self._say({"reset": True})
        assert self._line(ANSWER_S) == {"reset": True}, self.log

    def ask(self, command: Mapping[str, Any]) -> Any:
        self._say(command)
        return self._line(ANSWER_S)

    def close(self) -> None:
        """A clean end."""
        os.close(self._commands)
        self._commands = -1
        try:
            assert not self._answer(ANSWER_S), self.log
        finally:
            self.kill()

    def kill(self) -> None:
        """All of its processes, by SIGKILL. Returns when it has ended."""
        if self._end < 0:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        select.select([self._end], [], [])
        for file in (self._commands, self._replies, self._end):
            if file >= 0:
                os.close(file)
        self._end = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.kill()
        elif self._end >= 0:
            self.close()

    def _say(self, command: Mapping[str, Any]) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")

    def _line(self, within: float) -> Any:
        while b"\n" not in self._rest:
            more = self._answer(within)
            assert more, f"it has ended\n{self.log[-20_000:]}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _answer(self, within: float) -> bytes:
        """What it says next; nothing: it has ended."""
        readable, _, _ = select.select([self._replies], [], [], within)
        assert readable, f"no answer within {within:g} s\n{self.log[-20_000:]}"
        return os.read(self._replies, 1 << 20)
