"""The client for programs without an event loop: the verbs, names, arguments and errors of the asynchronous one.

:class:`Client` runs an asynchronous client on a loop in a thread of its own. What it hands out may be used from several
threads. A call that is interrupted (Ctrl-C) is cancelled and leaves nothing held. A forked child cannot use it.
"""

from kvtier.sync.across import AcrossGroups, AcrossLease, AcrossLeases
from kvtier.sync.cache import Cache
from kvtier.sync.client import Client
from kvtier.sync.lease import Leases, ReadLease, WriteLease
from kvtier.sync.mirror import Mirror
from kvtier.sync.watch import Watch

__all__ = [
    "AcrossGroups",
    "AcrossLease",
    "AcrossLeases",
    "Cache",
    "Client",
    "Leases",
    "Mirror",
    "ReadLease",
    "Watch",
    "WriteLease",
]
