"""One run from its start to its summary."""
