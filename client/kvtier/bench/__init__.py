"""``kvtier bench``: what a daemon costs on this machine, beside what the machine could do without it.

Every figure with a floor is measured in rounds that alternate between the two, so that a noisy machine hits both; what
is told is the ratio of their medians, and how far the rounds spread.
"""
