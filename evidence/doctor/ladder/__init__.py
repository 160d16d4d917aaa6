"""The same step in one format after another, compiled, over several ranks, and for some steps."""
