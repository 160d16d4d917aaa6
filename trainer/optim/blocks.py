"""Learning rates by the repeated blocks of a model (``Recipe.blocks``)."""

from __future__ import annotations

from torch import nn

from trainer.errors import UserError


def layer_factors(model: nn.Module, blocks: list[nn.Module], decay: float) -> dict[str, float]:
    """Return layer-wise multiples of the learning rate, by the names of the model's parameters.

    What follows the last of n blocks, such as the head, has 1; that block has ``decay``, the first one ``decay``ⁿ, and
    what is before it, such as embeddings or a stem, ``decay``ⁿ⁺¹. What is between two blocks counts to the one before
    it. The order is that of ``named_parameters``, so a tied weight has the place of its first name.

    Clark et al., "ELECTRA", 2020; Bao et al., "BEiT", 2022.

    Raises:
        UserError: the recipe names no blocks.
    """
    if not blocks:
        raise UserError(
            "optimizer.layer_decay: this recipe's model has no repeated blocks to count; use optimizer.groups"
        )
    numbers = {id(block): number for number, block in enumerate(blocks, 1)}
    starts = {f"{name}.": numbers[id(module)] for name, module in model.named_modules() if id(module) in numbers}
    factors, level = {}, 0
    for name, _ in model.named_parameters():
        inside = next((number for start, number in starts.items() if name.startswith(start)), None)
        level = inside or level
        top = inside is None and level == len(blocks)
        factors[name] = decay ** (0 if top else len(blocks) + 1 - level)
    return factors
