"""Checkpoints, with everything that is needed to resume a run exactly: write, verify, restore."""
