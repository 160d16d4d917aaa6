"""Every module call of a step in the reference, to be computed again alone, in any precision.

Alone means: the operators that are in no submodule. They get what they had in the reference: the call's inputs, the
submodules' results, and the gradients of all that they compute: the call's results, and the submodules' inputs. So an
error has one place, errors do not add up, and a rounding in one layer flips no ReLU of the next, which would change
gradients by the square root of the unit roundoff.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class Different(Exception):
    """A call takes another way than in the reference."""


@dataclass
class Values:
    """The arguments of a call, or its results: nested, with the floating-point tensors apart."""

    structure: TreeSpec
    leaves: list[Any]
    """Without the floating-point tensors, which are None here."""
    tensors: list[Tensor]
    """Detached."""
    differentiable: list[bool]
    """Whether a tensor has a gradient."""
    versions: list[int]
    """How often a tensor had been changed in place."""
    places: list[int]
    """Where the tensors are among the leaves."""

    @classmethod
    def of(cls, value: Any) -> Values:
        leaves, structure = tree_flatten(value)
        found = [leaf for leaf in leaves if _is_number(leaf)]
        rest = [None if _is_number(leaf) else leaf for leaf in leaves]
        places = [number for number, leaf in enumerate(leaves) if _is_number(leaf)]
        gradients = [tensor.requires_grad for tensor in found]
        return cls(structure, rest, [tensor.detach() for tensor in found], gradients, versions(found), places)

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the nested value with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)


@dataclass
class Call:
    """One call of a module."""

    module: str
    number: int
    """Of this module's calls, from 0."""
    given: Values
    returned: Values | None = None
    overwritten: bool = False
    """Its results were changed in place afterwards; the evaluation in the reference restores them."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the loss with respect to the results, by position; those that are not used have none."""
    children: list[Call] = field(default_factory=list)
    operators: int = 0
    """That run in it and in none of its submodules."""
    skipped: str = ""
    """Why it cannot be evaluated."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Of the given tensors in the low precision."""
    result_dtypes: list[torch.dtype] = field(default_factory=list)
    autocast: torch.dtype | None = None
    """The autocast dtype in the low precision; None: off."""
    in_island: bool = False
    """Whether it is inside of an fp32 island, whose outermost module alone casts its results back to 16 bits."""
    accumulated: float = math.nan
    """The relative error of its results in the low precision's own run, with all that came before it."""
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the given tensors, by position, through this call alone; filled when it is evaluated in the reference."""

    @property
    def results(self) -> list[Tensor]:
        return self.returned.tensors if self.returned else []

    def sources(self) -> list[Tensor]:
        """Return what its own operators get: its arguments, and the results of its submodules."""
        return [*self.given.tensors, *(tensor for child in self.children for tensor in child.results)]

    def source_names(self) -> list[str]:
        """Return a name for each of ``sources``."""
        names = [f"input {number}" for number in range(len(self.given.tensors))]
        return names + [f"{self._name(c)}'s result {n}" for c in self.children for n in range(len(c.results))]

    def source_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of ``sources`` in the low precision."""
        return [*self.dtypes, *(dtype for child in self.children for dtype in child.result_dtypes)]

    def target_names(self) -> list[str]:
        """Return a name for each tensor that its own operators compute."""
        names = [f"result {number}" for number in range(len(self.results))]
        return names + [f"{self._name(c)}'s input {n}" for c in self.children for n in range(len(c.given.tensors))]

    def target_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of what its own operators compute in the low precision."""
        return [*self.result_dtypes, *(dtype for child in self.children for dtype in child.dtypes)]

    def cotangents(self) -> dict[int, Tensor]:
        """Return the gradients of the loss with respect to what its own operators compute, by position."""
        found, start = dict(self.gradients), len(self.results)
        for child in self.children:
            found |= {start + position: gradient for position, gradient in child.input_gradients.items()}
            start += len(child.given.tensors)
        return found

    def _name(self, child: Call) -> str:
        return child.module.removeprefix(self.module).lstrip(".")


class Evaluated(NamedTuple):
    """What the own operators of a call compute, and their vector-Jacobian product."""

    targets: list[Tensor]
    passed: list[bool]
    """Whether a target is a source as it is."""
    gradients: dict[str, Tensor]
    """By name: those of the sources and of the parameters."""


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def numbers_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if _is_number(leaf)]


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution", "convolution_backward")
_ATTENTION = "_scaled_dot_product"


def products(name: str) -> int:
    """Return how many matrix products an operator is, in series; fused attention is two."""
    return 2 if name.startswith(_ATTENTION) else int(name in _PRODUCTS)


def summands(name: str, of: list[Tensor]) -> int:
    """Return how many numbers a product adds up for one of its results, from its floating-point inputs."""
    if name == "convolution":
        return of[1].numel() // of[1].shape[0]
    if name == "convolution_backward":
        return of[0].numel() // of[0].shape[1]
    if name.startswith(_ATTENTION):
        return max(of[0].shape[-1], of[1].shape[-2])
    return of[-2].shape[-1]


def versions(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [tensor._version for tensor in tensors]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference over that of ``expected``, of the elements where that is finite.

    Infinite, if ``found`` is not finite there; NaN, if ``expected`` is 0.
    """
    found, expected = found.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not bool(finite.all()):
        found, expected = found[finite], expected[finite]
    size = torch.linalg.vector_norm(expected).item()
    error = torch.linalg.vector_norm(found - expected).item()
    if not size:
        return math.nan
    return error / size if math.isfinite(error) else math.inf
