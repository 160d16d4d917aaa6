"""Everything that is needed to continue a run as if nothing had happened: written, verified, restored."""
