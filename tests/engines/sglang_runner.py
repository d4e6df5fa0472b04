"""An SGLang engine that does as it is told: one JSON object a line in, one out. Run by the engine's Python.

``sglang_runner.py ARGUMENTS``: those of ``sglang.Engine`` as a JSON object. The commands:

- ``{"prompts": [[ids], ...], "tokens": n}`` generates greedily, one prompt after the other; the answer has the tokens,
  their log-probabilities and the cached tokens of each prompt.
- ``{"reset": true}`` forgets what the engine itself has cached, on the device and in its host pool.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

_RESET_S: Final = 30.0


class Runner:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._external = 0

    def generate(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        started = time.monotonic()
        outputs = [self._one(prompt, command["tokens"]) for prompt in command["prompts"]]
        seconds = time.monotonic() - started
        return {"outputs": outputs, "seconds": seconds, "external": self._external, "held_s": 0.0}

    def reset(self) -> Mapping[str, Any]:
        """SGLang refuses while pages are on their way to the storage."""
        end = time.monotonic() + _RESET_S
        while not (done := self._engine.flush_cache().success) and time.monotonic() < end:
            time.sleep(0.02)
        return {"reset": done}

    def close(self) -> None:
        self._engine.shutdown()

    def _one(self, prompt: Sequence[int], tokens: int) -> Mapping[str, Any]:
        started = time.monotonic()
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = self._engine.generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=3
        )
        told = answer["meta_info"]
        self._external += (told["cached_tokens_details"] or {}).get("storage", 0)
        return {
            "tokens": answer["output_ids"],
            "logprobs": [told["output_token_logprobs"], told["output_top_logprobs"]],
            "cached": told["cached_tokens"],
            "first_s": time.monotonic() - started,
        }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang prints
    runner = Runner(json.loads(sys.argv[1]))
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        command = json.loads(line)
        answer = runner.reset() if "reset" in command else runner.generate(command)
        replies.write(json.dumps(answer) + "\n")
    runner.close()


if __name__ == "__main__":
    main()
