"""Other libraries' names of formats; without torch, so that a mistake in a command line is answered at once."""

_APEX = ("fp32", "fp16", "fp16_master", "fp16_pure")
_OTHERS = {
    **dict.fromkeys(("64", "64-true", "float64", "double"), "fp64"),
    **dict.fromkeys(("no", "32", "32-true", "float32", "float"), "fp32"),
    **dict.fromkeys(("16", "16-mixed", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    "16-true": "fp16_pure",
    "bf16-true": "bf16_pure",
    "transformer-engine": "fp8",
    **{f"{letter}{level}": name for level, name in enumerate(_APEX) for letter in "Oo"},
}
"""Formats by the names of torch, Lightning, accelerate and apex; a dtype is that of autocast."""


def format_name(given: object) -> str:
    """Translate another library's name of a format, such as ``torch.bfloat16``; return any other name unchanged."""
    name = str(given).removeprefix("torch.")
    return _OTHERS.get(name, name)
