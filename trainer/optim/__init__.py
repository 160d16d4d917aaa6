"""From gradients to new weights: optimizer, schedule, clipping, master weights, the update."""
