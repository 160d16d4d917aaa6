"""The arithmetic of training on many GPUs: bytes, times, and where the bottleneck is."""
