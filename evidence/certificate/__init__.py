"""A run that is killed again and again, compared with one that is not."""
