"""What is trained: one file per family of models, one per kind of data."""
