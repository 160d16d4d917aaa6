"""From YAML and ``key=value`` to typed, checked options."""
