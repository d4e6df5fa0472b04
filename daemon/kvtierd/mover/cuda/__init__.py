"""The mover where the device tier is a GPU: streams, events, page-locked memory.

Everything here is for threads; the loop never makes a CUDA call. ``plan`` is pure.
"""
