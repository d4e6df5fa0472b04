"""``kvtier doctor``: whether this machine gives a daemon what its configuration needs, and what to do about it.

Each module reads facts from the machine and judges them. Judging is a function of facts and settings alone, so that
every verdict can be tested on any machine; what only root may see is a warning with the reason, never a guess.
"""
