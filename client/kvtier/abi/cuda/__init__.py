"""NVIDIA's driver, as far as a device tier needs it: memory that processes share, streams, events and copies.

``driver`` opens one device, ``memory`` holds an allocation and its mapping, ``views`` shows bytes of it to torch and
others, ``page_locks`` prepares host memory, ``errors`` says what a failed call means. NVIDIA's bindings are imported
when a device is opened, never before.
"""
