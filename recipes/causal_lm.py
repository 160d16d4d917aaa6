"""Causal language models of transformers, any of them: new ones of random weights, or pretrained ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mantissa.display import shortened
from mantissa.errors import described
from recipes.any_model import AnyModel
from recipes.data.text.samples import NO_TARGET, sample_datasets
from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import Ids, TextDatasets, TokenData
from recipes.huggingface import RECIPES
from recipes.language import (
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
from trainer.precision.modes import allow_cudnn_attention
from trainer.recipe import Context, Decision, LossOutput, Sizes

_SPECIAL = ("bos_token", "eos_token", "pad_token")


@dataclass
class CausalLM(AnyModel):
    """The ``recipe=causal_lm`` config: text to next tokens. Presets of it have sizes with names (``SizedRecipe``)."""

    name: ClassVar[str] = "causal_lm"
    known_sum = True
    unit = "tokens"
    task = "CAUSAL_LM"
    generates = True
    cpu_sizes = Sizes(steps=200, batch_size=8, micro_batch_size=8)
    gpu_sizes = Sizes(steps=200, batch_size=8, micro_batch_size=8)
    longest = 1024
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

    def sample_datasets(self, tokens: TokenData) -> TextDatasets:
        known = int(self.pretrained_config().vocab_size) if self.pretrained else 0
        if self.lora.rank and known and tokens.added:
            problem = "adapters cannot learn the tokens of a chat template, and this model's tokenizer has none"
            raise UserError(f"{problem}; train all weights, or a model with a chat template", "recipe.lora.rank=0")
        return sample_datasets(tokens, self.tokens_per_sample, known, self._positions() if self.pretrained else None)

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[Ids], Dataset], str]:
        context = self.tokens_per_sample
        return tokenizer, lambda part: TokenWindows(part, context), ""

    def unfit(self, config: Any) -> str:
        if config.is_encoder_decoder:
            return "encodes one text and decodes another"
        return "" if config.model_type in self.classes() else "does not continue a text"

    def own_config(self, datasets: TextDatasets) -> dict[str, Any]:
        """Return the special tokens of the tokenizer: others may lie beyond the vocabulary."""
        return {f"{role}_id": datasets.tokenizer.token_id(role) for role in _SPECIAL}

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
            on_meta = torch.get_default_device().type == "meta"  # some models compute while they are built
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
        rows = torch.arange(4).repeat(3, 1)
        rows[1, 3] += 1  # another end
        rows[2, :2] += 1  # another text before the last two
        rows %= network.config.vocab_size  # which may be of a few characters
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
            why = "" if takes else ", as it takes no positions"
            problem = f"{type(network).__name__} lets a text see the one before it in the window{why}"
            raise UserError(f"data.packing=true: {problem}", "data.packing=false")

    def needs_logits(self, datasets: TextDatasets) -> str:
        """Return why the loss cannot be computed in chunks; empty: it can."""
        with torch.device("meta"):
            return needs_logits(super().new_model(datasets))

    def count_targets(self, batch: Batch) -> int:
        """Every token but each sample's first is predicted, or those that ``targets`` has."""
        if "targets" in batch:
            return int((batch["targets"] != NO_TARGET).sum())
        tokens = batch["tokens"]
        return tokens.shape[0] * (tokens.shape[1] - 1)

    def count_units(self, batch: Batch) -> int:
        """Count tokens, without padding, whether they are to be predicted or not."""
        return int(batch["lengths"].sum()) if "lengths" in batch else self.count_targets(batch)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Predict each token from those before it.

        A batch has ``tokens``, int64 B × (T + 1); or B × T with the ``targets`` of each, perhaps ``positions``, and
        ``lengths``, int64 B: the tokens of each row that are no padding.
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

    def summary_fields(self, model: Any, datasets: TextDatasets) -> dict[str, Any]:
        """Return why training computes all logits, and where the routers of a mixture of experts are."""
        facts, found = super().summary_fields(model, datasets), routers(model.network)
        facts |= {"loss": f"of all logits ({model.logits_for})"} if model.logits_for else {}
        return facts | ({"routers": shortened(found, 1)} if found else {})

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in the model."""
        return {f"{self.name}.{name}": tensor for name, tensor in super().exported(folder).items()}

    def shown_by(self, datasets: TextDatasets) -> list[str]:
        words = datasets.first_words
        chat = ["chat=true"] * bool(datasets.tokens.samples)
        return ["generate.py", *chat, f"prompt={words}"] if words else super().shown_by(datasets)
