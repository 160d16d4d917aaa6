"""The local metric log, its plots, and MLflow behind it."""
