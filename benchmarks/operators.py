"""Torch's operators in groups: what multiplies matrices, and what everything else is."""

from __future__ import annotations

import re

PRODUCTS = re.compile(r"(mm|linear|conv\w*|attention\w*)(_backward)?$|convolution|attention|mm_|scaled_mm")
"""Operators that run on the hardware's matrix units."""
ATTENTION, PRODUCTS_GROUP = "fused attention", "products"
ELEMENTWISE = "element-wise operators and the rest"
GROUPS = {
    ATTENTION: re.compile(r"attention"),
    PRODUCTS_GROUP: PRODUCTS,
    "normalisation": re.compile(r"(layer|batch|group|instance|rms)_norm"),
    "optimizer and clipping": re.compile(r"_fused_(adam|sgd)|_foreach_|linalg_vector_norm|addcdiv_|addcmul_|lerp_"),
    "copies, casts and views": re.compile(
        r"copy|^to$|clone|contiguous|^cat$|^stack$|fill_|zero|empty|ones|as_strided|view|reshape|transpose|^t$|permute"
        r"|narrow|slice|select|split|chunk|expand|detach|unsqueeze|squeeze|flatten|arange|^result_type$"
    ),
    "reductions, softmax and losses": re.compile(
        r"softmax|nll_loss|cross_entropy|^sum|^mean|^norm|max|min|argmax|pool"
    ),
}
"""Groups by what their names contain; the first that fits counts. All others are ``ELEMENTWISE``."""


def group(name: str) -> str:
    """Return the group of an operator, such as ``aten::addmm``."""
    short = name.removeprefix("aten::")
    return next((title for title, pattern in GROUPS.items() if pattern.search(short)), ELEMENTWISE)


def by_group(times: dict[str, float]) -> dict[str, float]:
    """Return the times of operators added up by group; groups without any have 0."""
    totals = dict.fromkeys((*GROUPS, ELEMENTWISE), 0.0)
    for name, time in times.items():
        totals[group(name)] += time
    return totals
