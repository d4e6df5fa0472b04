"""See ``driver``."""

__version__ = "13.0.3"
