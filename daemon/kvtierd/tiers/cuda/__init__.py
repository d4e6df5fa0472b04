"""The device tier in the memory of a GPU.

``pool`` opens the GPU, once for all caches, and holds what each of them has of its memory; ``store`` says where in it
the slots are. Copies are the mover's business.
"""
