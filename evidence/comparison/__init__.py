"""Arms and seeds compared: intervals, verdicts, the report."""
