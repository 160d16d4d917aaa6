"""What a person sets, in words: how a change of a step is typed or written."""

from __future__ import annotations

from collections.abc import Sequence

from mantissa.formats import Format


class Remedies:
    """What to set, in the words of plain torch; a subclass says it in those of another program."""

    deterministic = "torch.use_deterministic_algorithms(True)"
    eager = "no torch.compile"
    fresh_state = "a new optimizer before this step"
    time_budget = "time_budget_s={0:.0f}, or --time-budget {0:.0f}s"

    def modules(self, names: Sequence[str]) -> str:
        """Return how these submodules come to compute in fp32."""
        return f"mantissa.keep_fp32(model, {list(names)})"

    def operators(self, names: Sequence[str]) -> str:
        """Return how these operators come to compute in fp32."""
        return f"with mantissa.fp32_ops({list(names)}): … around forward and loss"

    def format(self, format: Format) -> str:
        """Return how another format is chosen."""
        half = format.autocast
        return "fp32 weights" + (f" under torch.autocast(device, dtype={half})" if half else ", without autocast")

    def scale(self, value: float) -> str:
        """Return how the loss scale begins with a value."""
        return f"torch.amp.GradScaler(init_scale={value:.10g})"

    def rate(self, factor: float) -> str:
        """Return how the learning rate is multiplied."""
        return f"a learning rate of {factor:g} times the present one"
