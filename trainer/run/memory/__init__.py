"""The memory that a run needs: its forecast, the microbatch that fits, and what to do where it does not suffice."""
