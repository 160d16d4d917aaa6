"""The search for good options: the learning-rate range test, and Optuna's trials."""
