"""Limits that several checks share."""

NOISE = 0.5
"""From this relative error by rounding on, a result is noise in a format however it is computed, and is not judged."""
HARM = 0.05
"""Relative error of a step's gradients from which on an error does harm."""
WRONG_LOSS = 0.02
"""Relative error of a step's loss from which on it is wrong, whatever its gradients are: five roundings to bf16."""
