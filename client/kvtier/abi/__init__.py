"""Formats that the daemon and a client on the same machine share, byte for byte.

``words`` has the enumerations of the wire, ``spec`` the meaning of a cache's bytes, ``keys`` the keys of blocks,
``event_hashes`` TensorRT-LLM's hashes of blocks, ``layout`` the map of a shared-memory arena, ``key_index`` the index
of its blocks, and ``attach`` the protocol that hands it over. Standard library and numpy only, so that importing is
cheap.
"""
