"""Remote stores, a module per store behind a common contract."""
