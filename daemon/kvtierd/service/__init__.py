"""The service: speaks with clients. It validates, calls the engine and translates; it decides nothing about blocks."""
