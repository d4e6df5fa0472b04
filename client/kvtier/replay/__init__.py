"""Replays of request traces against a daemon, with every byte and every event checked."""
