"""Carries out what the core decides: moves bytes between tiers and answers waiting calls.

The loop thread owns every :class:`~kvtierd.core.manager.BlockManager`; threads own copies and know slots and buffers
only.
"""
