"""A stand-in for NVIDIA's package of this name, for processes of tests. Put ``tests/fakes`` first on their PYTHONPATH:
a regular package, as this is, then comes before the namespace package that NVIDIA's distributions share."""
