"""What precision does to one training step of a PyTorch model; needs torch and numpy only."""

__version__ = "0.2.0"
