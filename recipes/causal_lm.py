"""Causal language models of transformers, any of them: new ones of random weights, or pretrained ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from mantissa.errors import described, nearest
from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import TextDatasets
from recipes.huggingface import RECIPES, TextRecipe, check_context, generated
from recipes.language import (
    NO_TARGET,
    LanguageModel,
    TokenWindows,
    balance_of,
    needs_logits,
    routers,
    torch_can_chunk,
    use_causal_kernels,
)
from trainer.data.contract import Batch, Dataset
from trainer.errors import UserError, check_number, is_out_of_memory
from trainer.hardware import Hardware, threads
from trainer.precision.modes import allow_cudnn_attention
from trainer.recipe import Context, Decision, LossOutput, Sizes

_SAMPLE_TOKENS = 64
_SAMPLE_S = 2.0
_ON_CPU = 256
"""Tokens of a sample of a new model on a CPU, where ``context`` is auto."""
_SPECIAL = ("bos_token", "eos_token", "pad_token")


@dataclass
class CausalLM(TextRecipe):
    """The ``recipe=causal_lm`` config: text to next tokens. Presets of it have sizes with names (``SizedRecipe``)."""

    name: ClassVar[str] = "causal_lm"
    known_sum = True
    unit = "tokens"
    architecture: ClassVar[tuple[str, ...]] = ("model_type", "config", "pretrained")
    adjustable = ("context",)
    cpu_sizes = Sizes(steps=200, batch_size=8, micro_batch_size=8)
    gpu_sizes = Sizes(steps=200, batch_size=8, micro_batch_size=8)
    longest = 1024
    attention: str = "auto"
    """sdpa: torch's fused kernels; eager: T × T scores in memory; auto: sdpa, where transformers has it for the
    model."""
    model_type: str | None = None
    """Transformers' type of a new model, such as qwen3, gemma3_text or mixtral."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' config of the model, such as ``recipe.config.num_hidden_layers=4``."""
    chunked_loss: bool | str = "auto"
    """Compute the loss in chunks: slower, but the fp32 logits never exist as a whole. auto: on a GPU, if they and
    their gradients take more than the free memory (torch 2.13 and later)."""
    vocabulary_multiple: int = 64
    """Pad the vocabulary to a multiple of this, for tensor cores; 1, or with ``lora``: no padding. The loss is the
    same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.chunked_loss, str) and self.chunked_loss != "auto":
            raise UserError(f"recipe.chunked_loss={self.chunked_loss} must be true, false or auto")
        check_number("recipe.vocabulary_multiple", self.vocabulary_multiple)

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Choose the model, the context and the form of the loss."""
        resolved, decisions = super().resolve(context)
        if self.chunked_loss is True and not torch_can_chunk():
            raise UserError(
                f"recipe.chunked_loss=true needs a newer torch than {torch.__version__}", "recipe.chunked_loss=auto"
            )
        if self.chunked_loss != "auto":
            asked = self.chunked_loss is True and context.datasets is not None
            if why := resolved.needs_logits(context.datasets) if asked else "":
                raise UserError(f"recipe.chunked_loss=true: {why}", "recipe.chunked_loss=auto")
            return resolved, decisions
        before = context.recorded.get("recipe.chunked_loss", False)
        if context.recorded or not context.hardware.is_gpu or not torch_can_chunk():
            return replace(resolved, chunked_loss=before is True and torch_can_chunk()), decisions
        if context.datasets is None:
            return resolved, decisions
        # fp32 logits, log-probabilities and gradients: 12 bytes for each token and entry of the vocabulary
        tokens = context.micro_batch_size * resolved.tokens_per_sample
        chunked = 12 * tokens * context.datasets.vocabulary > context.free_bytes
        chunked = chunked and not resolved.needs_logits(context.datasets)
        why = "the logits take more than the free memory"
        decisions += [Decision("recipe.chunked_loss", True, why)] if chunked else []
        return replace(resolved, chunked_loss=chunked), decisions

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[np.ndarray], Dataset], str]:
        context = self.tokens_per_sample
        return tokenizer, lambda part: TokenWindows(part, context), ""

    def choose_model(self, hardware: Hardware) -> list[Decision]:
        """Choose the kind of attention, and the context of a new model.

        Raises:
            UserError: there is no such model, or it is none that continues a text.
        """
        if self.pretrained and self.model_type:
            mistake = f"recipe.model_type={self.model_type}"
            raise UserError(f"{mistake} has no effect with init_from, which sets the model", "", mistake=mistake)
        if not (self.pretrained or self.model_type):
            raise UserError(
                "recipe=causal_lm trains any model, and none is named: set init_from to a hub id or a folder, or "
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
            decisions.append(Decision("recipe.context", min(_ON_CPU, positions or _ON_CPU), "tokens, for a CPU"))
        return decisions

    @property
    def kind(self) -> str:
        """Transformers' type of the model."""
        return str(self.model_type or self.pretrained_config().model_type)

    def network_class(self) -> Any:
        """Return transformers' class of the model."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.kind])

    def check_type(self, config: Any) -> None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind, remedies = config.model_type, [f"recipe={config.model_type}"] * (config.model_type in RECIPES)
        option = f"init_from={self.pretrained}" if self.pretrained else f"recipe.model_type={kind}"
        if config.is_encoder_decoder:
            why = "encodes one text and decodes another"
        elif (text := config.get_text_config()) is not config:
            why = "takes images or other inputs beside text"
            remedies += [f"recipe.model_type={text.model_type}"] * (not self.pretrained)
        elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            why = "does not continue a text"
        else:
            return
        raise UserError(f"{option}: a model of type {kind} {why}; recipe=causal_lm cannot train it", *remedies)

    def _positions(self) -> int | None:
        config = self.pretrained_config() if self.pretrained else self._config_of({})
        positions = getattr(config, "max_position_embeddings", None)
        return positions if positions and positions > 0 else None  # such as XLNet's -1

    def config_options(self) -> dict[str, Any]:
        return self._known_options(type(self.pretrained_config())) if self.config else {}

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
                mistake = f"recipe.config.{key}={value}"
                raise UserError(f"{mistake} has no effect: the tokenizer's is used", "", mistake=mistake)
            if key not in known:
                near = nearest(key, known, "recipe.config.")
                raise UserError(f"recipe.config.{key} is no option of transformers' {cls.__name__}{near}")
            is_real = name in options and options[name].annotation is float and type(value) is int
            given[name] = float(value) if is_real else value  # its classes take no 1 for 1.0
        return given

    def _config_of(self, more: dict[str, Any]) -> Any:
        """Return transformers' config of a new model, with more options below those of the user."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        if self.model_type not in CONFIG_MAPPING:
            near = nearest(str(self.model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
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

    def new_config(self, cls: Any, vocabulary: int, datasets: TextDatasets) -> Any:
        """Return the config; of special tokens it has those of the tokenizer: others may lie beyond the vocabulary."""
        ids = {f"{role}_id": datasets.tokenizer.token_id(role) for role in _SPECIAL}
        config = self._config_of(ids | {"vocab_size": vocabulary})
        config._attn_implementation = self.attention
        return config

    def new_model(self, datasets: TextDatasets) -> LanguageModel:
        """Return the model with the loss inside of forward.

        Raises:
            UserError: the options make no model that runs, or it sees what it must not see.
        """
        try:
            network = super().new_model(datasets)
            if datasets.tokens.packing or self.kind != self.name:  # a preset's model is known
                self._try_out(network, datasets.tokens.packing)
        except Exception as error:  # of each model's own
            on_meta = torch.get_default_device().type == "meta"  # where a model that computes as it is built cannot be
            if isinstance(error, UserError) or is_out_of_memory(error) or on_meta or self.kind == self.name:
                raise
            raise UserError(f"this config makes no {self.kind} that runs ({described(error)})") from error
        return self.with_loss(network, datasets, datasets.vocabulary)

    def with_loss(self, network: Any, datasets: TextDatasets, vocabulary: int | None = None) -> LanguageModel:
        """Return transformers' model with the loss inside of forward; ``vocabulary`` see ``LanguageModel``."""
        tokens = datasets.tokens
        if not tokens.packing:
            use_causal_kernels(network, self.tokens_per_sample)
        if network.config._attn_implementation == "sdpa":
            allow_cudnn_attention(False)  # for what is packed or has a window transformers makes masks
        padded = bool(tokens.samples) and not tokens.packing
        return LanguageModel(network, self.name, self.chunked_loss is True, vocabulary, padded)

    def _try_out(self, network: Any, packing: bool) -> None:
        """Run a model once over four tokens, and raise UserError where one sees what it must not see.

        That is a later token, as of encoders, and with ``packing`` the text before its own. Both are tried, as no
        property of transformers' classes tells them. On the meta device nothing is.
        """
        if network.device.type == "meta":
            return
        rows = torch.arange(4).repeat(3, 1) % network.config.vocab_size
        rows[1, 3] -= 3  # another end
        rows[2, :2] += 2  # another text before the last two
        takes = "position_ids" in inspect.signature(network.base_model.forward).parameters
        borders = {"position_ids": torch.tensor([[0, 1, 0, 1]]).expand(3, -1)} if packing and takes else {}
        balance = {"output_router_logits": True} if balance_of(network) else {}
        mode = network.training
        with torch.no_grad():
            output = network.eval()(input_ids=rows, use_cache=False, **borders, **balance)
        network.train(mode)
        one, other_end, other_start = output.logits
        if balance and output.aux_loss is None:
            problem = f"{type(network).__name__} computes no loss of unequal experts in this transformers"
            raise UserError(problem, "recipe.config.router_aux_loss_coef=0")
        least = 1e-5 * one.abs().max()
        if (one - other_end)[:3].abs().max() > least:
            remedies = [f"recipe={self.kind}"] * (self.kind in RECIPES)
            raise UserError(
                f"a model of type {self.kind} sees later tokens, and cannot learn to predict them", *remedies
            )
        if packing and (one - other_start)[2:].abs().max() > least:
            why = "sees the text before" if takes else "takes no positions, by which it would tell the texts apart"
            raise UserError(f"data.packing=true: {type(network).__name__} {why}", "data.packing=false")

    def needs_logits(self, datasets: TextDatasets) -> str:
        """Return why the loss cannot be computed in chunks; empty: it can."""
        with torch.device("meta"):
            return needs_logits(super().new_model(datasets))

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the longest list of modules that transformers splits between devices as a whole, else of one class."""
        network = model.network
        lists, inside = list[list[nn.Module]](), set[int]()
        for module in network.modules():
            if isinstance(module, nn.ModuleList) and id(module) not in inside:
                lists.append(list(module))
                inside |= {id(part) for part in module.modules()}
        whole = set(network._no_split_modules or ())
        named = [some for some in lists if all(whole & {base.__name__ for base in type(part).__mro__} for part in some)]
        equal = [some for some in lists if len({type(part) for part in some}) == 1]
        return max(named or equal, key=len, default=[])

    def count_targets(self, batch: Batch) -> int:
        """Every token but each sample's first is predicted, or those that ``targets`` has."""
        if "targets" in batch:
            return int((batch["targets"] != NO_TARGET).sum())
        tokens = batch["tokens"]
        return tokens.shape[0] * (tokens.shape[1] - 1)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Predict each token from those before it.

        A batch has ``tokens``, int64 B × (T + 1); or B × T with the ``targets`` of each, and perhaps ``positions``.
        """
        tokens = batch["tokens"]
        if "targets" in batch:
            return LossOutput(model(tokens, batch["targets"], batch.get("positions")), {})
        return LossOutput(model(tokens[:, :-1], tokens[:, 1:]), {})

    def report(self, loss: float, sums: dict[str, float], targets: int) -> dict[str, float]:
        """Report the loss in nats per token, and its exponential."""
        return {"loss": loss, "perplexity": math.inf if loss > 700 else math.exp(loss)}

    def fp32_modules(self, model: Any) -> list[str]:
        """Return the routers of a mixture of experts: between two close experts 16 bits would choose another one."""
        inside = next(name for name, module in model.named_modules() if module is model.network)
        return [f"{inside}.{name}" for name in routers(model.network)]

    def summary_fields(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        """Return the size, the type and the blocks."""
        blocks: Any = self.blocks(model)
        kinds = sorted({type(block).__name__ for block in blocks})
        facts = {"type": self.kind, "blocks": f"{len(blocks)} × {', '.join(kinds)}" if blocks else "none found"}
        return super().summary_fields(model, datasets) | facts

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in the model."""
        return {f"{self.name}.{name}": tensor for name, tensor in super().exported(folder).items()}

    def shown_by(self, datasets: TextDatasets) -> list[str]:
        words = datasets.first_words
        return ["generate.py", f"prompt={words}"] if words else super().shown_by(datasets)

    def closing_text(self, model: LanguageModel, datasets: TextDatasets, device: torch.device) -> str:
        """Show a short sample of generated text in one line: as much as fits into two seconds."""
        tokenizer = datasets.tokens.tokenizer
        start = datasets.tokens.valid[: min(16, self.tokens_per_sample // 2)].astype(np.int64)
        prompt = torch.from_numpy(start)[None].to(device)
        length = min(_SAMPLE_TOKENS, self.tokens_per_sample - prompt.shape[1])
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 1.0}
        ends = {"max_new_tokens": length, "max_time": _SAMPLE_S, "eos_token_id": None}
        torch.manual_seed(0)
        try:
            with threads(1):  # a token is little work to share: where CPUs are busy, threads wait for each other
                ids = generated(model.network, prompt, tokenizer.vocab_size, **drawn, **ends)
        except FloatingPointError as error:
            return f"no sample: {error}"
        written = ids[0, len(start) :].tolist()
        cut = f" ({len(written)} of {length} tokens in {_SAMPLE_S:g} s)" * (len(written) < length)
        text = f"‹{tokenizer.decode(start.tolist())}›{tokenizer.decode(written)}"
        return f"sample{cut}  {' '.join(text.split())}"
