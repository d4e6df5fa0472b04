"""The mover for a device tier on a GPU: streams, events, page-locked memory.

Only threads call this package; the loop never makes a CUDA call. ``plan`` is pure.
"""
