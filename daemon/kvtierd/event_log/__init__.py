"""The durable event log: what has left the hub's ring, for watchers that come late, come back or fall behind."""

from __future__ import annotations

from kvtierd.event_log.log import EventLog, LogStatus
from kvtierd.event_log.runs import LoggedRun

__all__ = ["EventLog", "LogStatus", "LoggedRun"]
