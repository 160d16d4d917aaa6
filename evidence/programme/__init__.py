"""What is worth measuring first on a GPU machine, in order, within a budget of time."""
