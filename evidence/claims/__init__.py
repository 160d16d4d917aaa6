"""Published claims, their criteria and their outcomes."""
