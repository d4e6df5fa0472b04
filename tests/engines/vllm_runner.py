"""A vLLM engine that does as it is told: one JSON object a line in, one out. Run by the engine's Python.

``vllm_runner.py``: imports vLLM, and forks an engine for each message on the socket that is its standard input, with
the arguments of ``vllm.LLM``: the import takes longer than what a test does with a tiny model. An engine's commands:

- ``{"prompts": [[ids], ...], "tokens": n or [n, ...], "together": bool, "at_once": n, "salt": str, "abort_after": n,
  "unread": bool}`` generates greedily, one prompt after the other, together, or ``at_once`` at a time; the answer has
  the tokens, their log-probabilities and the cached tokens of each prompt. ``abort_after``: all are aborted after so
  many steps. ``unread``: no stored prefix is read. ``session``: of the prompts. ``params``: their
  transfer parameters; ``hints``: the actions of their envelope.
- ``{"reset": true}`` forgets the engine's own prefix cache; ``"connector": true``: the connector's, too.
- ``{"free": true}`` asks for the number of blocks that no request holds.

A line ``{"step": n}`` is written after each step of a generation that was asked for with ``"tell": true``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams
from vllm.distributed import get_pp_group
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

import kvtier.connectors.vllm  # noqa: F401 – before the forks

MESSAGE_BYTES: Final = 1 << 16
_PAUSE_S: Final = 0.001  # as in vLLM's own loop, after a step without computation


class StageRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM 0.32 makes the inputs of a later stage in its warm-up, which it leaves out without a compiler."""

    def load_model(self, *given: Any, **more: Any) -> None:
        super().load_model(*given, **more)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )


vllm.v1.worker.cpu_worker.CPUModelRunner = StageRunner


class Runner:
    def __init__(self, arguments: Mapping[str, Any], tell: Callable[[object], None]) -> None:
        self._engine = LLM(**arguments).llm_engine
        self._tell = tell
        self._ids = 0

    def generate(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        started = time.monotonic()
        outputs = self._run(command["prompts"], command)
        seconds = time.monotonic() - started
        self._drain()
        held = time.monotonic() - started - seconds
        return {"outputs": outputs, "seconds": seconds, "held_s": held, "external": self._external()}

    def reset(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"reset": self._engine.reset_prefix_cache(reset_connector=command.get("connector", False))}

    def free(self, command: Mapping[str, Any]) -> int:
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    def _run(self, prompts: Sequence[Sequence[int]], command: Mapping[str, Any]) -> list[Any]:
        unread = {"skip_reading_prefix_cache": True} if command.get("unread") else {}
        parameters = {"extra_args": {"kv_transfer_params": command["params"]}} if "params" in command else {}
        sampling = partial(SamplingParams, temperature=0, logprobs=3, ignore_eos=True, **unread, **parameters)
        hints = KvHintsEnvelope("1", "m", [KvHintAction(*each) for each in command.get("hints", ())])
        tokens = command["tokens"] if isinstance(command["tokens"], list) else [command["tokens"]] * len(prompts)
        extra = {"cache_salt": command["salt"]} if command.get("salt") else {}
        at_once = len(prompts) if command.get("together") else command.get("at_once", 1)
        names = [str(self._ids + at) for at in range(len(prompts))]
        waiting = deque(zip(names, prompts, tokens, strict=True))
        self._ids += len(prompts)
        last, began, first_s, steps = dict[str, Any](), dict[str, float](), dict[str, float](), 0
        while waiting or self._engine.has_unfinished_requests():
            while waiting and self._engine.get_num_unfinished_requests() < at_once:
                name, prompt, most = waiting.popleft()
                began[name] = time.monotonic()
                asked, session = {"prompt_token_ids": prompt, **extra}, command.get("session")
                self._engine.add_request(name, asked, sampling(max_tokens=most), session_id=session, kv_hints=hints)
            outputs = self._engine.step()
            for output in outputs:
                first_s.setdefault(output.request_id, time.monotonic() - began[output.request_id])
                last[output.request_id] = output
            steps += 1
            if command.get("tell"):
                self._tell({"step": steps})
            if steps == command.get("abort_after"):
                self._engine.abort_request(names)
            if not outputs:
                time.sleep(_PAUSE_S)
        return [_told(last[name], first_s[name]) for name in names if name in last]

    def _drain(self) -> None:
        """Steps on until the connector holds no request: an engine in a process of its own does so by itself."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            core.step_fn()
            time.sleep(_PAUSE_S)

    def _external(self) -> int:
        """Prompt tokens that came from the connector since the engine started."""
        metrics = {metric.name: metric for metric in self._engine.get_metrics()}
        counter: Any = metrics.get("vllm:external_prefix_cache_hits")
        return counter.value if counter is not None else 0


def _told(output: Any, first_s: float) -> Mapping[str, Any]:
    (completion,) = output.outputs
    logprobs = [sorted((token, value.logprob) for token, value in step.items()) for step in completion.logprobs]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "first_s": first_s,
        "params": output.kv_transfer_params,
    }


def run(arguments: Mapping[str, Any]) -> None:
    """An engine on this process's standard input and output, until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output

    def tell(message: object) -> None:
        replies.write(json.dumps(message) + "\n")

    runner = Runner(arguments, tell)
    tell({"ready": True})
    answers = {"reset": runner.reset, "free": runner.free, "prompts": runner.generate}
    for line in sys.stdin:
        command = json.loads(line)
        (answer,) = [answer for name, answer in answers.items() if name in command]
        tell(answer(command))


def main() -> None:
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the engines
    while True:
        message, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
        if not message:
            return
        child = os.fork()
        if child == 0:
            break
        for file in files:
            os.close(file)
        requests.send(str(child).encode())
    requests.close()
    os.setsid()  # the processes of an engine are killed together
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    told = json.loads(message)
    os.environ.update(told["variables"])
    run(told["arguments"])


if __name__ == "__main__":
    main()
