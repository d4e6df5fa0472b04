"""What the executors are asked: prompts with shared beginnings, in two tenants."""

import random
from collections.abc import Sequence
from typing import Final

from tests.trtllm.executor import Executor, Request
from tests.trtllm.model import VOCABULARY

_RANDOM: Final = random.Random(7)
SHARED: Final = tuple(_RANDOM.choices(range(VOCABULARY), k=37))
TAILS: Final = tuple(tuple(_RANDOM.choices(range(VOCABULARY), k=size)) for size in (30, 3, 21, 48))


def ask(executor: Executor, *, salts: Sequence[str | None] = (None, "b")) -> list[Request]:
    """Four prompts that begin alike for each tenant, two of them twice."""
    asked = [(salt, SHARED + tail) for salt in salts for tail in (*TAILS, *TAILS[:2])]
    return [executor.submit(prompt, new=3 + at % 4 * 5, salt=salt) for at, (salt, prompt) in enumerate(asked)]


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [each.output for each in requests]
