"""Which setting of a recipe is fastest, or needs the least memory, on this machine."""
