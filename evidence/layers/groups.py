"""Groups of linear layers that multiply scaled numbers: blocks, and layers of one kind in all blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mantissa.formats import BF16
from trainer.precision import scaled
from trainer.precision.modules import OPTION, chosen
from trainer.precision.names import matching, override_of
from trainer.profiling.flops import ModelFlops
from trainer.trainer import Trainer

MOST = 8
"""Groups of blocks, at most: of more blocks those that follow each other are lifted together."""


@dataclass(frozen=True)
class Group:
    """Layers that are lifted together: they multiply in bf16, all others in the mode's format."""

    patterns: tuple[str, ...]
    """Patterns of ``precision.modules`` that match them, and no other layer that could be lifted."""
    layers: frozenset[str]
    """Names of the layers."""

    @property
    def label(self) -> str:
        """What tables call it."""
        return " + ".join(self.patterns)

    def __or__(self, other: Group) -> Group:
        return Group(tuple(dict.fromkeys(self.patterns + other.patterns)), self.layers | other.layers)


@dataclass(frozen=True)
class Layers:
    """The linear layers of a model that multiply scaled numbers, and what a step multiplies."""

    modules: Sequence[str]
    """Names of all modules."""
    blocks: Sequence[str]
    """Names of the repeated blocks."""
    flops: Mapping[str, int]
    """FLOP in the format of each layer that can be lifted, over a few samples; in the order of the model."""
    fixed: int
    """FLOP in scaled formats of layers that the user's own ``precision.modules`` decide on."""
    total: int
    """FLOP of all matmuls and convolutions."""
    unknown: frozenset[str] = frozenset()
    """Operators of which torch has no FLOP formula."""

    def share(self, lifted: Group | None = None) -> float | None:
        """Return the share of the multiplications, by FLOP, in scaled formats; None: it is not known."""
        if self.unknown:
            return None
        left = sum(flops for name, flops in self.flops.items() if lifted is None or name not in lifted.layers)
        return (left + self.fixed) / self.total

    def cost(self, lifted: Group) -> int:
        """Return the FLOP that leave the low format."""
        return sum(self.flops[name] for name in lifted.layers)

    def groups(self) -> list[Group]:
        """Return blocks, layers outside of them, and kinds of layers; no group has all layers, and no two the same."""
        # Block by block, then what is in none, layer by layer; of many, neighbours together.
        of_block = {block: self.inside(block) for block in self.blocks}
        in_blocks = frozenset().union(*of_block.values())
        units = [block for block, layers in of_block.items() if layers]
        units += [layer for layer in self.flops if layer not in in_blocks]
        size = max(1, -(-len(units) // MOST))
        found = []
        for place in range(0, len(units), size):
            names = units[place : place + size]
            found.append(self.group(frozenset().union(*map(self.inside, names)), [names]))

        # Layers of the same place in their blocks.
        kinds: dict[str, set[str]] = {}
        for block, layers in of_block.items():
            for layer in self.flops:
                if layer in layers and layer != block:
                    kinds.setdefault(layer.removeprefix(f"{block}."), set()).add(layer)
        found += [self.group(frozenset(layers), [[kind], [f"*.{kind}"]]) for kind, layers in kinds.items()]
        return self.distinct(found)

    def distinct(self, sets: Iterable[Group | None]) -> list[Group]:
        """Return the groups, each once, without those that have all layers."""
        first: dict[frozenset[str], Group] = {}
        for each in sets:
            if each and len(each.layers) < len(self.flops):
                first.setdefault(each.layers, each)
        return [*first.values()]

    def group(self, layers: frozenset[str], names: Iterable[Sequence[str]] = ()) -> Group | None:
        """Return the group of these layers, by the first names or patterns that select them alone; else one by one.

        None: the layers are none, or no pattern that can be typed selects them.
        """
        for each in (*names, sorted(layers)):
            patterns = tuple(map(self._shortest, each))
            if layers and frozenset().union(*map(self._matched, patterns)) == layers:
                return Group(patterns, layers)
        return None

    def inside(self, module: str) -> frozenset[str]:
        """Return the layers in a module, or the layer that it is."""
        return frozenset(layer for layer in self.flops if layer == module or layer.startswith(f"{module}."))

    def _shortest(self, name: str) -> str:
        """Return the shortest end of a module's name that selects the same layers; a pattern stays."""
        parts, layers = name.split("."), self.inside(name)
        ends = [".".join(parts[place:]) for place in reversed(range(len(parts)))] if layers else []
        # A number alone says little, and Hydra does not take it as a name.
        typeable = [end for end in ends if not _is_number(end.partition(".")[0])] + [f"{name}*"]
        return next((end for end in typeable if layers and self._matched(end) == layers), name)

    def _matched(self, pattern: str) -> frozenset[str]:
        if _is_number(pattern):
            return frozenset()
        modules = matching(OPTION, pattern, self.modules, "submodule")
        return frozenset().union(*map(self.inside, modules))


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdigit()


def layers_of(low: Trainer, high: Trainer) -> Layers:
    """Return the scaled layers of a model.

    Args:
        low: trainer in the mode.
        high: the same in bf16, whose matmuls are counted: those of an emulated format are not the model's alone.
    """
    names = {id(module): name for name, module in low.model.named_modules()}
    blocks = [names[id(block)] for block in low.recipe.blocks(low.model)]

    # The FLOP of each layer are those between the begin and the end of its calls; with ``precision.gradients`` the
    # backward pass is not in its format.
    counter, flops, begun = ModelFlops(), dict.fromkeys(scaled.converted(low.model), 0), [0]

    def so_far() -> int:
        return counter.total if low.config.precision.gradients is None else counter.forward

    def begin(*_: object) -> None:
        begun[0] = so_far()

    def end(name: str, *_: object) -> None:
        flops[name] += so_far() - begun[0]

    handles = []
    for name in flops:
        module = high.model.get_submodule(name)
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(partial(end, name))]
    try:
        high.observe(counter)
    finally:
        for handle in handles:
            handle.remove()

    # What the user has chosen by name stays as it is.
    named = [name for name, _ in chosen(low.config.precision.modules, low.model)]
    own = {layer for layer in flops if any(layer == name or layer.startswith(f"{name}.") for name in named)}
    free = {name: count for name, count in flops.items() if name not in own}
    fixed = sum(count for name, count in flops.items() if name in own)
    return Layers([*names.values()][1:], blocks, free, fixed, counter.total, frozenset(counter.unknown))


def override(lifted: Group | None, own: Mapping[str, str]) -> list[str]:
    """Return the override, if any, that lifts a group beside the user's ``own`` modules, which decide over it."""
    modules = {**dict.fromkeys(lifted.patterns if lifted else (), BF16.name), **own}
    return [override_of(OPTION, modules)] if modules else []
