"""What recipes of one of transformers' models share: its named sizes, and the defaults among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from recipes.data.text.tokens import TextDatasets
from recipes.huggingface import RECIPES, TransformersRecipe, check_context
from trainer.errors import UserError, check_choice, no_effect
from trainer.hardware import Hardware
from trainer.recipe import Decision, Sizes


@dataclass
class SizedRecipe(TransformersRecipe):
    """A model in a named size. A subclass names its sizes and the defaults among them; it may be a preset of a recipe
    of more models, which it then stands in front of.
    """

    model_class: ClassVar[str] = ""
    """Name of transformers' class of the model."""
    shapes: ClassVar[Mapping[str, Any]] = {}
    """Shapes by name, in ascending order: NamedTuples of options of transformers' config, and ``context``."""
    on_cpu: ClassVar[str] = ""
    on_gpu: ClassVar[str] = ""
    cpu_sizes: ClassVar[Sizes]
    """Steps and batches of every size on a CPU; on a GPU of those up to ``on_cpu``, for which they are made, too."""
    gpu_sizes: ClassVar[Sizes]
    """Steps and batches of the other sizes on a GPU, and of a pretrained model."""

    attention: str = "sdpa"
    """sdpa: torch's fused kernels, where they support the model's mask and bias; eager: T × T scores in memory."""
    size: str = "auto"
    """A name out of ``shapes``; auto: ``on_cpu`` or ``on_gpu``."""

    def check_type(self, config: Any) -> None:
        if (other := config.model_type) != self.name:
            recipe = other if other in RECIPES else "causal_lm"
            problem = f"init_from={self.pretrained} is of type {other}, not {self.name}"
            raise UserError(f"{problem}; recipe=causal_lm opens any type that continues a text", f"recipe={recipe}")

    @property
    def kind(self) -> str:
        return self.name

    def network_class(self) -> Any:
        import transformers

        return getattr(transformers, self.model_class)

    def new_config(self, cls: Any, vocabulary: int, datasets: Any) -> Any:
        options = self.config_options() | self.shape._asdict() | self.own_config(datasets)
        del options["context"]
        return cls.config_class(vocab_size=vocabulary, attn_implementation=self.attention, **options)

    def choose_model(self, hardware: Hardware) -> list[Decision]:
        """Return what ``recipe.size=auto`` becomes; nothing for a size that the user set.

        Raises:
            UserError: there is no such size, or the options make no model.
        """
        if self.pretrained:
            if self.size != "auto":
                raise no_effect(f"recipe.size={self.size}", "init_from sets the size")
            check_context(self.context, self._positions())
            return []
        if self.size == "auto":
            size, why = (self.on_gpu, "for a GPU") if hardware.is_gpu else (self.on_cpu, "for a CPU")
            return [Decision("recipe.size", size, why)]
        check_choice("recipe.size", self.size, self.shapes)
        return []

    @property
    def tokens_per_sample(self) -> int:
        """``context``, where it is not auto, else the size's own; of a pretrained model at most ``longest``."""
        if isinstance(self.context, int) or self.pretrained:
            return super().tokens_per_sample
        return int(self.shape.context)

    @property
    def shape(self) -> Any:
        """The shape of the size."""
        return self.shapes[self.size]

    def sizes(self, hardware: Hardware) -> Sizes:
        if not hardware.is_gpu:
            return self.cpu_sizes
        small = [*self.shapes][: [*self.shapes].index(self.on_cpu) + 1]
        if self.pretrained or self.size not in small:
            return self.gpu_sizes
        most = max(self.cpu_sizes.micro_batch_size, self.gpu_sizes.micro_batch_size)
        return replace(self.cpu_sizes, micro_batch_size=most, why=f"the recipe's own for recipe.size={self.size}")

    def summary_fields(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        return super().summary_fields(model, datasets) if self.pretrained else {"size": self.size}
