"""Planted faults: tiny models that break in known ways, and what the doctor must say of each."""
