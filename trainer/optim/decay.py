"""Which parameters weight decay applies to."""

from __future__ import annotations

from torch import nn

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
_NOT_DECAYED = ("bias", "scale", "gamma", "gain", "norm", "token", "pos_emb", "position", "temperature")
"""Parts of the names of parameters that are not decayed: they add to activations, scale them or are activations."""


def decayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay applies to.

    The role of a parameter decides: it has two or more dimensions (a matrix or a convolution's kernel), is not in a
    normalisation layer, and its name does not contain bias, scale, token or position. So ConvNeXt's ``layer_scale``,
    a vision transformer's ``class_token`` and ``pos_embedding``, and Swin's ``relative_position_bias_table`` and
    ``logit_scale`` are not decayed. ``nn.Embedding`` is decayed, also of positions, as in GPT-2's published recipe.
    """
    names = set()
    for owner, module in model.named_modules():
        if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
            continue
        for name, parameter in module.named_parameters(owner, recurse=False):
            own = name.rpartition(".")[2].lower()
            if parameter.ndim >= 2 and not any(word in own for word in _NOT_DECAYED):
                names.add(name)
    return names
