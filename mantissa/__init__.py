"""What precision does to a training step of any PyTorch model; needs torch and numpy only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mantissa.doctor.examine import examine as examine
    from mantissa.errors import NotFiniteError as NotFiniteError
    from mantissa.errors import UsageError as UsageError
    from mantissa.step.islands import keep_fp32 as keep_fp32
    from mantissa.step.operators import fp32_ops as fp32_ops
    from mantissa.verdict.gate import precision_gate as precision_gate
    from mantissa.watch.watch import Watch as Watch

__version__ = "0.3.0"
_HOMES = {
    "NotFiniteError": "errors",
    "UsageError": "errors",
    "Watch": "watch.watch",
    "examine": "doctor.examine",
    "fp32_ops": "step.operators",
    "keep_fp32": "step.islands",
    "precision_gate": "verdict.gate",
}
"""The modules of the public names, which are imported when they are asked for."""
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return import_module("mantissa.callbacks")
    if name in _HOMES:
        return getattr(import_module(f"mantissa.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
