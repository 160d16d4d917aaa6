"""Which dtype what is computed in, and the scale of the loss."""
