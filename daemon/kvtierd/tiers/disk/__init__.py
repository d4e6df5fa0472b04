"""The disk tier: preallocated slabs moved by direct I/O, and an LMDB index that says which blocks they hold.

``root`` is the directory, ``store`` one cache in it. Everything blocks: call it from threads.
"""
