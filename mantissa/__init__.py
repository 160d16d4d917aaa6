"""What precision does to one training step of a PyTorch model; needs torch and numpy only."""
