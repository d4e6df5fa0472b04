"""Tiers: where bytes live. Device and host are shared memory, the disk is a directory."""
