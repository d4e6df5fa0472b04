"""The device tier in the memory of a GPU.

``pool`` opens the GPU, once for all caches, holds the memory of each cache there, and finds slots in it. The mover
makes the copies.
"""
