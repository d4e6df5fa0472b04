"""The part of NVIDIA's driver that a device tier needs: memory that processes share, streams, events and copies.

``driver`` opens one device, ``memory`` holds an allocation and its mapping, ``views`` shows its bytes to torch and
other libraries, ``page_locks`` locks host memory, ``errors`` classifies failed calls. NVIDIA's bindings are imported
when a device is opened, never before.
"""
