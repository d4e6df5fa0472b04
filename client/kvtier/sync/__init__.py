"""The client for programs without an event loop: the verbs, names, arguments and errors of the asynchronous one.

:class:`Client` runs an asynchronous client on a loop in a thread of its own. What it hands out may be used from several
threads. A call that is interrupted (Ctrl-C) is cancelled and leaves nothing held. A forked child cannot use it.
"""

from kvtier.sync.cache import AcrossGroups, AcrossLease, Cache, Leases, ReadLease, WriteLease
from kvtier.sync.client import Client, Mirror, Watch

__all__ = [
    "AcrossGroups",
    "AcrossLease",
    "Cache",
    "Client",
    "Leases",
    "Mirror",
    "ReadLease",
    "Watch",
    "WriteLease",
]
