"""MLflow: the tracking store, what is sent to it, and what is fetched from it."""
