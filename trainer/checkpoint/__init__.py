"""Everything that is needed to resume a run exactly: written, verified, restored."""
