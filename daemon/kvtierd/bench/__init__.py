"""Measurements that need the daemon's insides, for ``kvtier bench``, which may not import them.

They ship with the daemon rather than with the repository, so that an installed system can be measured, and are run as
modules of their own: nothing in a daemon that serves imports them.
"""
