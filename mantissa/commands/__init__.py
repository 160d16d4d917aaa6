"""The commands of ``python -m mantissa``, a module each."""
