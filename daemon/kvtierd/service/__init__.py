"""The service: validates requests of clients, calls the engine, translates answers. The core decides about blocks."""
