"""What the trainer is shown to do: runs of it, measured and judged. Nothing in trainer/ or recipes/ imports it."""
