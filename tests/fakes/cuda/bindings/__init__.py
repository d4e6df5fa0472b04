"""See ``driver``."""
