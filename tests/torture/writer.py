"""A client that has reserved slots, and writes on into them whatever has become of them; see :class:`Actor`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Final

from kvtier import Client, Tier
from tests.integration.touching import scribble_into

SLOTS: Final = 6
_SCRIBBLES_S: Final = 0.1


def write(address: str, cache: str, forks: bool) -> None:
    """Says its session and its process, waits for a line, scribbles and ends. ``forks``: a child does all of that."""
    client = Client(address)
    lease = client.open_cache(cache).reserve(SLOTS, Tier.HOST)
    views = [lease.view(index) for index in range(SLOTS)]
    if forks and (child := os.fork()):
        os.waitpid(child, 0)  # killed meanwhile; the child lives on with the pipes
    print(json.dumps({"session": client.session_id, "pid": os.getpid()}), flush=True)
    sys.stdin.readline()
    end = time.monotonic() + _SCRIBBLES_S
    while time.monotonic() < end:
        for view in views:
            scribble_into(view)
    os._exit(0)


if __name__ == "__main__":
    write(**json.loads(sys.stdin.readline()))
