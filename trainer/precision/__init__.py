"""The dtype of each computation, and the loss scale."""
