"""Past events on disk, for watchers that come late, come back or fall behind.

- ``run``: consecutive events as bytes, and their record in a file.
- ``segments``: the files, oldest to newest, bounded in bytes.
- ``log``: the thread that writes the files, and the calls of the event loop.
"""

from kvtierd.event_log.log import LEAST_WAITING_BYTES, EventLog, LogStatus
from kvtierd.event_log.run import EventRun

__all__ = ["LEAST_WAITING_BYTES", "EventLog", "EventRun", "LogStatus"]
