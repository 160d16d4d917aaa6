"""What recipes of any of transformers' models share: which model it is, and the options of its config."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from mantissa.display import shortened
from mantissa.errors import nearest
from recipes.data.text.pretrained import opening
from recipes.huggingface import (
    RECIPES,
    WITH_WEIGHTS,
    TransformersRecipe,
    check_context,
    load_whole,
    network_of,
    positions_of,
)
from trainer.errors import UserError, no_effect
from trainer.hardware import Hardware
from trainer.recipe import Decision


@dataclass
class AnyModel(TransformersRecipe):
    """Any of transformers' models for one task: new ones of random weights, or pretrained ones.

    A subclass names the task.
    """

    architecture: ClassVar[tuple[str, ...]] = ("model_type", "config", "pretrained")
    adjustable = ("context",)
    task: ClassVar[str] = ""
    """What stands in transformers' MODEL_FOR_…_MAPPING_NAMES."""
    new_context: ClassVar[int] = 256
    """Tokens of a sample of a new model on a CPU, where ``context`` is auto."""

    attention: str = "auto"
    """sdpa: torch's fused kernels; eager: T × T scores in memory; auto: sdpa, where transformers has it for the
    model."""
    model_type: str | None = None
    """Transformers' type of a new model, such as qwen3, modernbert or bert."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' config of the model, such as ``recipe.config.num_hidden_layers=4``."""

    def choose_model(self, hardware: Hardware) -> list[Decision]:
        """Choose the kind of attention, and the context of a new model.

        Raises:
            UserError: there is no such model, or it is none for the task.
        """
        if self.pretrained and self.model_type:
            raise no_effect(f"recipe.model_type={self.model_type}", "init_from sets the model")
        if not (self.pretrained or self.model_type):
            raise UserError(
                f"recipe={self.name} trains any model, and none is named: set init_from to a hub id or a folder, or "
                "recipe.model_type to the type of a new one, and its size by recipe.config.…"
            )
        decisions, positions, network = [], self._positions(), self.network_class()
        if self.pretrained:
            check_context(self.context, positions)
        elif positions and isinstance(self.context, int) and self.context > positions:
            problem = f"recipe.context={self.context} is longer than the model's {positions}"
            raise UserError(problem, f"recipe.config.max_position_embeddings={self.context}")
        if self.attention == "auto":
            kind, lacks = ("sdpa", "has") if network._supports_sdpa else ("eager", "has no sdpa, but")
            decisions.append(Decision("recipe.attention", kind, f"which {network.__name__} {lacks}"))
        if self.context == "auto" and not self.pretrained and not hardware.is_gpu:
            tokens = min(self.new_context, positions or self.new_context)
            decisions.append(Decision("recipe.context", tokens, "tokens, for a CPU"))
        return decisions

    @property
    def kind(self) -> str:
        """Transformers' type of the model."""
        return str(self.model_type or self.pretrained_config().model_type)

    def classes(self) -> dict[str, str]:
        """Return transformers' names of the classes for the task, by the type of the model."""
        from transformers.models.auto import modeling_auto

        names: dict[str, str] = getattr(modeling_auto, f"MODEL_FOR_{self.task}_MAPPING_NAMES")
        return names

    def unfit(self, config: Any) -> str:
        """Return why a model of this config is none for the task; empty: it is one."""
        raise NotImplementedError

    def network_class(self) -> Any:
        """Return transformers' class of the model."""
        import transformers

        return getattr(transformers, self.classes()[self.kind])

    def check_type(self, config: Any) -> None:
        kind, remedies = config.model_type, [f"recipe={config.model_type}"] * (config.model_type in RECIPES)
        why = self.unfit(config)
        if not config.is_encoder_decoder and (text := config.get_text_config()) is not config:
            why = "takes images or other inputs beside text"
            alone = not self.pretrained and text.model_type in self.classes()
            remedies += [f"recipe.model_type={text.model_type}"] * alone
        if why:
            option = f"init_from={self.pretrained}" if self.pretrained else f"recipe.model_type={kind}"
            raise UserError(f"{option}: a model of type {kind} {why}; recipe={self.name} cannot train it", *remedies)

    def _positions(self) -> int | None:
        return positions_of(self.model_config())

    def model_config(self) -> Any:
        """Return transformers' config of the pretrained model, or of a new one of any vocabulary."""
        return self.pretrained_config() if self.pretrained else self._config_of({})

    def new_config(self, cls: Any, vocabulary: int, datasets: Any) -> Any:
        config = self._config_of(self.own_config(datasets) | {"vocab_size": vocabulary})
        config._attn_implementation = self.attention
        return config

    def config_options(self) -> dict[str, Any]:
        return self._known_options(type(self.pretrained_config())) if self.config else {}

    def open_pretrained(self, cls: Any, vocabulary: int, **options: Any) -> Any:
        try:
            return super().open_pretrained(cls, vocabulary, **options)
        except UserError:
            if not self.config:
                raise
        super().open_pretrained(cls, vocabulary)  # whose error is that of the folder itself
        keys = [f"recipe.config.{key}" for key in self.config]
        given = " ".join(f"{key}={value}" for key, value in zip(keys, self.config.values(), strict=True))
        raise UserError(f"init_from={self.pretrained} has no weights for {given}", "", mistake=" ".join(keys))

    def _known_options(self, cls: Any) -> dict[str, Any]:
        """Return ``config`` under the names that transformers' class of the config has for its options."""
        from transformers import PreTrainedConfig

        # Those that every config has say nothing about the model, but where the class has them as its own.
        own = {name for base in cls.__mro__ if base not in PreTrainedConfig.__mro__ for name in vars(base)}
        options, of_all = inspect.signature(cls).parameters, inspect.signature(PreTrainedConfig).parameters
        known = {name for name in options if name in own or name not in of_all} | {*cls.attribute_map}
        given: dict[str, Any] = {}
        for key, value in self.config.items():
            name = cls.attribute_map.get(key, key)
            if name == "vocab_size":
                raise no_effect(f"recipe.config.{key}={value}", "the tokenizer's is used")
            if key not in known:
                sizes = [name for name in options if name in known and type(options[name].default) is int]
                sizes = [name for name in sizes if name != "vocab_size" and not name.endswith("_id")]
                near = nearest(key, known, "recipe.config.") or f"; its sizes are {shortened(sizes)}"
                raise UserError(f"recipe.config.{key} is no option of transformers' {cls.__name__}{near}")
            is_real = name in options and options[name].annotation is float and type(value) is int
            given[name] = float(value) if is_real else value  # its classes take no 1 for 1.0
        return given

    def _config_of(self, more: dict[str, Any]) -> Any:
        """Return transformers' config of a new model, with more options below those of the user."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if self.model_type not in CONFIG_MAPPING:
            near = nearest(str(self.model_type), self.classes())
            raise UserError(f"recipe.model_type={self.model_type} is no type of this transformers{near}")
        cls: Any = CONFIG_MAPPING[self.model_type]
        options = self._known_options(cls)
        try:
            config = cls(**(more | options))
        except Exception as error:  # of checks that are each class's own
            why = " ".join(str(error).split())[:300]
            raise UserError(f"recipe.config makes no {self.model_type}: {why}") from error
        self.check_type(config)
        return config

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in transformers' model.

        It may have saved some in parts, such as those of experts, so that it reads them.
        """
        if self.kind == self.name:  # a preset's are saved as they are
            return super().exported(folder)
        key = f"init_from={folder}"
        with opening(str(folder), key, "cannot be opened by transformers", f"give a folder {WITH_WEIGHTS}") as place:
            return dict(load_whole(self.network_class(), key, place)[0].state_dict())

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the longest list of modules that transformers splits between devices as a whole, else of one class."""
        network = network_of(model)
        lists, inside = list[list[nn.Module]](), set[int]()
        for module in network.modules():
            if isinstance(module, nn.ModuleList) and id(module) not in inside:
                lists.append(list(module))
                inside |= {id(part) for part in module.modules()}
        whole = set(network._no_split_modules or ())
        named = [some for some in lists if all(whole & {base.__name__ for base in type(part).__mro__} for part in some)]
        equal = [some for some in lists if len({type(part) for part in some}) == 1]
        return max(named or equal, key=len, default=[])

    def summary_fields(self, model: nn.Module, datasets: Any) -> dict[str, Any]:
        """Return the size, the type and the blocks."""
        blocks: Any = self.blocks(model)
        kinds = sorted({type(block).__name__ for block in blocks})
        facts = {"type": self.kind, "blocks": f"{len(blocks)} × {', '.join(kinds)}" if blocks else "none found"}
        return super().summary_fields(model, datasets) | facts
