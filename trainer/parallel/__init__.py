"""Several processes (DDP, FSDP2), activation checkpointing and torch.compile."""
