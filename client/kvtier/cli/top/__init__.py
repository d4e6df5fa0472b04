"""``kvtier top``: what a daemon does, while it does it.

``counters`` and ``history`` turn what a daemon says of itself into rates, ``frame`` is one moment of all that is shown,
``panes`` and ``tables`` put it into lines, ``feed`` asks the daemon, ``app`` and ``screens`` are the screen. Only those
two need textual.
"""
