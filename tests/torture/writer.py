"""A client that reserves slots, and goes on writing into them after it has lost them; see :class:`Actor`."""

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
    """Prints its session and its process, waits for a line, scribbles and ends. ``forks``: a forked child does this."""
    client = Client(address)
    lease = client.open_cache(cache).reserve(SLOTS, Tier.HOST)
    views = [lease.view(index) for index in range(SLOTS)]
    if forks and (child := os.fork()):
        os.waitpid(child, 0)  # the parent is killed here; the child lives on with the pipes
    print(json.dumps({"session": client.session_id, "pid": os.getpid()}), flush=True)
    sys.stdin.readline()
    end = time.monotonic() + _SCRIBBLES_S
    while time.monotonic() < end:
        for view in views:
            scribble_into(view)
    os._exit(0)


if __name__ == "__main__":
    write(**json.loads(sys.stdin.readline()))
