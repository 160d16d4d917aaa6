"""Where a step is not finite, or computes more wrongly than its format makes necessary, and what cures it."""
