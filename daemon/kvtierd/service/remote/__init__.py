"""The remote tier: the daemon's knowledge of a store, fetches from it and from peers, writes to it."""
