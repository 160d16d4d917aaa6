"""MLflow: where it keeps things, what it is sent, what comes back."""
