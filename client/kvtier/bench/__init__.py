"""``kvtier bench``: compares kvtier with plain memcpy and the raw disk on this machine."""
