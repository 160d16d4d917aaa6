"""Data order, batching, loading, and copies to the device."""
