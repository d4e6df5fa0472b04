"""Traces through the core alone: no bytes, no sockets, no clock. ``kvtier simulate`` is its command line."""
