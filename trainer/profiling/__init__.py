"""The profiler, FLOP and matmul rates, and what rounding does to updates."""
