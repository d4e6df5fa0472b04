"""The client for programs without an event loop: the verbs, names, arguments and errors of the asynchronous client.

:class:`Client` runs an asynchronous client on an event loop in its own thread. Threads may share its objects. A call
that is interrupted (Ctrl-C) is cancelled and leaves nothing held. A forked child cannot use the client.

A name is imported at its first use.
"""

from kvtier import _import_lazily

_import_lazily(globals())
