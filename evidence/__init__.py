"""Evidence about the trainer: its runs, measured and judged. Nothing in trainer/ or recipes/ imports this package."""
