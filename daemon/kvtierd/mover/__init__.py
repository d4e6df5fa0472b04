"""Carries out the core's decisions: moves bytes between tiers and answers waiting calls.

The loop thread owns every :class:`~kvtierd.core.manager.BlockManager`. Worker threads own copies and know only slots
and buffers.
"""
