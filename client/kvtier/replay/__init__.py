"""Real traffic, replayed: a request trace run against a daemon, with every byte and every event checked."""
