"""Kernels of torch that a model calls: which may be used, which are used, and which write wrong results here."""
