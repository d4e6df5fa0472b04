"""What the daemon and a client on the same machine share, byte for byte.

``words`` are those of the wire, ``spec`` says what a cache's bytes mean, ``keys`` names blocks, ``event_hashes`` names
them as TensorRT-LLM does, ``layout`` is the map of a shared-memory arena, ``key_index`` how blocks are found in it, and
``attach`` the conversation that hands it over. Standard library and numpy only, so that importing it is cheap.
"""
