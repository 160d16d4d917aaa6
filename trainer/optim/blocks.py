"""What the repeated blocks of a model (``Recipe.blocks``) decide about its parameters: learning rates, and Muon."""

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


def inputs_first(model: nn.Module) -> set[str]:
    """Return the names of the matrices that are inputs × outputs: those of transformers' Conv1D, as in GPT-2.

    All others are outputs × inputs, as ``nn.Linear`` has them.
    """
    return {
        f"{owner}.weight".lstrip(".")
        for owner, module in model.named_modules()
        if any(each.__name__ == "Conv1D" for each in type(module).__mro__)  # FSDP2 derives a class from it
    }


def hidden_matrices(model: nn.Module, blocks: list[nn.Module]) -> set[str]:
    """Return the names of the parameters for Muon: those of two dimensions in the model's blocks, but no embeddings.

    Raises:
        UserError: there are none, or the recipe names no blocks.
    """
    inside = {id(module) for block in blocks for module in block.modules() if not isinstance(module, nn.Embedding)}
    found = {
        name
        for owner, module in model.named_modules()
        if id(module) in inside
        for name, parameter in module.named_parameters(owner, recurse=False)
        if parameter.ndim == 2
    }
    if not found:
        lack = "the blocks of this recipe's model have none" if blocks else "this recipe names no repeated blocks"
        raise UserError(
            f"optimizer.name=Muon trains the matrices in the blocks of a model, but {lack}; use optimizer=adamw"
        )
    return found
