"""Published claims, their criteria, and outcomes."""
