"""Which sample comes when, batching, and the way to the device."""
