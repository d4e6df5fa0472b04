"""The disk tier: preallocated slabs, read and written by direct I/O, and an LMDB index of the blocks in them.

``root`` is the directory, ``store`` a cache in it. All calls block: make them in threads.
"""
