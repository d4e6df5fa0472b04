"""Connectors that let engines keep their KV cache in kvtier: a module per engine, which imports the engine."""
