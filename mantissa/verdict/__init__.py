"""What several runs say together: verdicts with an error rate."""
