"""Why a step is not finite, or not exact: the module, the operator, the direction, and the format that breaks."""
