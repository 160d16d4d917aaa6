"""The profiler, bytes by category, energy."""
