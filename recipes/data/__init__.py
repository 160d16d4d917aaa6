"""The choices of ``data=``."""
