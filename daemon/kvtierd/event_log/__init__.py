"""The durable event log: what has left the hub's ring, for watchers that come late, come back or fall behind."""

from __future__ import annotations

from kvtierd.event_log.log import EventLog, LogStatus
from kvtierd.event_log.runs import LoggedRun
from kvtierd.event_log.writer import LEAST_WAITING_BYTES

__all__ = ["LEAST_WAITING_BYTES", "EventLog", "LogStatus", "LoggedRun"]
