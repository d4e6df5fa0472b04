"""Past events on disk, for watchers that come late, come back or fall behind.

- ``run``: some consecutive events, as bytes, and the record of them in a file.
- ``segments``: the files, oldest to newest, bounded in bytes.
- ``log``: the thread that writes them, and what the event loop asks.
"""

from kvtierd.event_log.log import LEAST_WAITING_BYTES, EventLog, LogStatus
from kvtierd.event_log.run import Run

__all__ = ["LEAST_WAITING_BYTES", "EventLog", "LogStatus", "Run"]
