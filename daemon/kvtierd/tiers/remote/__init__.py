"""Stores beyond this host, one module each behind one contract."""
