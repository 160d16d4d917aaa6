"""What the recipes of transformers' models share: a named size, the kind of attention, a folder to export."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mantissa.display import counted, dimensions, listed, quantity, shortened
from recipes.data.text.corpus import TokenizedText
from recipes.data.text.pretrained import opening
from recipes.data.text.shards import TokenShards
from recipes.data.text.tokenizers import CHATML, CHATML_TOKENS, Tokenizer
from recipes.data.text.tokens import Ids, TextDatasets, TextSource, TokenData
from recipes.export import save_model, token_tables
from recipes.lora import ALL, LoRA, with_adapters
from trainer.checkpoint.reader import check_numbers, nonfinite, not_finite
from trainer.checkpoint.weights import defect, open_file
from trainer.data.contract import Dataset
from trainer.errors import UserError, check_choice, check_number, check_range, no_effect
from trainer.files import is_kept, read_json, write_json
from trainer.hardware import Hardware
from trainer.recipe import Context, DataSource, Decision, Recipe, Sizes

log = logging.getLogger("mantissa")
ATTENTION = ("sdpa", "eager")
"""torch's fused kernels; or a matmul, a softmax and a matmul, which keep scores of T × T."""
WITH_WEIGHTS = "that save_pretrained wrote, with weights for torch"
"""For messages: what a folder of transformers' models has to be."""
_NUMBER = re.compile("[0-9]+")
RECIPES = ("gpt2", "llama", "bert", "t5")
"""The recipes that open folders of transformers' models; a recipe's name is transformers' own for the type of model."""


@dataclass
class TransformersRecipe(Recipe):
    """A model of transformers, new or pretrained, perhaps with adapters; it is exported for transformers.

    A subclass names its model (``network_class``, ``new_config``) and its samples (``sampling``).
    """

    # Of adamw's 1e-3: 1e-4, as the upper end of what is usual; and the 2e-4 of Hu et al. 2021 (table 11, GPT-2) and of
    # Dettmers et al., "QLoRA", 2023 (table 9, 7B and 13B).
    fine_tuning_lr: ClassVar[float | None] = 0.1
    adapter_lr: ClassVar[float | None] = 0.2
    cpu_sizes: ClassVar[Sizes]
    gpu_sizes: ClassVar[Sizes]
    least_context: ClassVar[int] = 2
    reads_data = True
    longest: ClassVar[int] = 512
    """Tokens of a sample of a pretrained model that takes more, where ``context`` is auto."""
    generates: ClassVar[bool] = False
    """Whether its models write text, as scripts/generate.py shows."""
    says_new_head = False
    """Whether ``resolve`` says what becomes of the head of pretrained weights."""
    vocabulary_multiple = 1
    """The vocabulary is padded to a multiple of this; not with adapters."""

    pretrained: str | None = None
    """What ``init_from`` sets where it is no run: a hub id or folder, which brings its own tokenizer."""
    context: int | str = "auto"
    """Context length, in tokens; auto: that of the size, or what the start says for a model without sizes."""
    attention: str = "sdpa"
    """sdpa: torch's fused kernels, where they support the model's mask and bias; eager: T × T scores in memory."""
    lora: LoRA = field(default_factory=LoRA)
    """Low-rank adapters, of which only the weights are trained (Hu et al. 2021), through peft."""

    def __post_init__(self) -> None:
        check_choice("recipe.attention", self.attention, dict.fromkeys((type(self).attention, *ATTENTION)))
        check_number("recipe.context", self.context, self.least_context)
        check_range("recipe.dropout", getattr(self, "dropout", 0.0), "[0, 1)")  # Llama has none

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Choose the model and the context."""
        decisions, data = self.choose_model(context.hardware), context.data
        if isinstance(self._text(data), TokenizedText | TokenShards) and self.pretrained:  # defaults may stay
            for key in ("tokenizer", "vocab_size"):
                if (value := getattr(data, key)) not in (getattr(type(data), key), self.pretrained):
                    raise no_effect(f"data.{key}={value}", f"init_from={self.pretrained} brings its own tokenizer")
        if (chosen := self.with_options(decisions)).context == "auto":
            tokens = chosen.tokens_per_sample
            decisions.append(Decision("recipe.context", tokens, "tokens per sample, the size's own"))
        resolved = self.with_options(decisions)
        if self.lora.rank and self.lora.target == "auto":
            target = self.lora.targets(self.kind)
            why = "all linear layers but the output" if target == [ALL] else f"peft's choice for {self.kind}"
            decisions.append(Decision("recipe.lora.target", target, why))
            resolved = replace(resolved, lora=replace(self.lora, target=target))
        return resolved, decisions

    def choose_model(self, hardware: Hardware) -> list[Decision]:
        """Return what the options of the model that are auto become.

        Raises:
            UserError: the options make no model.
        """
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """Transformers' type of the model."""
        raise NotImplementedError

    @property
    def tokens_per_sample(self) -> int:
        """``context``, where it is not auto, else the model's own; of a pretrained model at most ``longest``."""
        if isinstance(self.context, int):
            return self.context
        return min(self.longest, self._positions() or self.longest)

    def sizes(self, hardware: Hardware) -> Sizes:
        return self.gpu_sizes if hardware.is_gpu else self.cpu_sizes

    def datasets(self, data: DataSource, seed: int) -> TextDatasets:
        """Tokenise, and cut into samples.

        Raises:
            UserError: the data is no text, one of its parts is too short for a sample, or it cannot be read.
        """
        tokens, context = self._text(data).tokens(self.pretrained), self.tokens_per_sample
        if tokens.samples:
            return self.sample_datasets(tokens)
        parts = {"training": tokens.train, "validation": tokens.valid, "test": tokens.test}
        shortest, part = min((len(array), part) for part, array in parts.items() if array is not None)
        if shortest < context + 1:
            remedies = [f"recipe.context={shortest // 2}"] if shortest // 2 >= self.least_context else []
            problem = f"data={data.kind}: the {part} text has {shortest} tokens, one sample needs {context + 1}"
            raise UserError(f"{problem}; give a longer text", *remedies)
        tokenizer, samples, about = self.sampling(tokens.tokenizer)
        known = int(self.pretrained_config().vocab_size) if self.pretrained else tokenizer.vocab_size
        if (new := tokenizer.vocab_size - known) > 0:
            about += f", {new} of the tokenizer's tokens are new to the model"
        return TextDatasets(
            samples(tokens.train),
            samples(tokens.valid),
            f"{tokens.description}{about}",
            test=None if tokens.test is None else samples(tokens.test),
            tokens=tokens,
            tokenizer=tokenizer,
            vocabulary=max(tokenizer.vocab_size, known),
        )

    def _text(self, data: DataSource) -> TextSource:
        if not isinstance(data, TextSource):
            use = "use data=python_docs, text, hub, tokens or synthetic"
            raise UserError(f"recipe={self.name} cannot read data={data.kind}; {use}")
        return data

    def sample_datasets(self, tokens: TokenData) -> TextDatasets:
        """Return datasets of samples that are texts of their own, such as chats.

        Raises:
            UserError: the recipe trains on running text alone.
        """
        title = tokens.description.partition(":")[0]
        raise UserError(f"recipe={self.name} trains on running text, and {title} has samples of its own, such as chats")

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[Ids], Dataset], str]:
        """Return the text's tokenizer with the special tokens of the recipe, what makes samples of a part's ids, and a
        description of them, which follows that of the text.
        """
        raise NotImplementedError

    def network_class(self) -> Any:
        """Return transformers' class of the model."""
        raise NotImplementedError

    def new_config(self, cls: Any, vocabulary: int, datasets: Any) -> Any:
        """Return transformers' config of a new model of that class and so many token ids."""
        raise NotImplementedError

    def own_config(self, datasets: Any) -> dict[str, Any]:
        """Return what the data decides of the config of a new model, such as its special tokens."""
        raise NotImplementedError

    def config_options(self) -> dict[str, Any]:
        """Return the options of transformers' config that hold of a pretrained model, too, such as dropout."""
        return {}

    def new_model(self, datasets: Any) -> Any:
        """Return transformers' model in fp32, without adapters: the pretrained one, or one of random weights."""
        if sys.flags.optimize > 1:
            raise UserError("transformers needs docstrings: leave out python -OO and PYTHONOPTIMIZE=2")
        cls = self.network_class()
        if self.attention == "sdpa" and not cls._supports_sdpa:
            raise UserError(
                f"the {cls.__name__} of this transformers has no recipe.attention=sdpa", "recipe.attention=eager"
            )
        # With adapters it stays as it is: peft would save a table of another size with them, which fits no base model.
        multiple = 1 if self.lora.rank else self.vocabulary_multiple
        vocabulary = math.ceil(datasets.vocabulary / multiple) * multiple
        if self.pretrained:
            return self.open_pretrained(cls, vocabulary, **self.config_options())
        return cls(self.new_config(cls, vocabulary, datasets))

    def build_model(self, datasets: Any) -> Any:
        """Build the model, and put the adapters into it."""
        model = self.new_model(datasets)
        self.lora.inject(network_of(model))
        return model

    def check_type(self, config: Any) -> None:
        """Raise UserError where transformers' config of ``pretrained`` is of a type that the recipe does not train."""
        raise NotImplementedError

    def pretrained_config(self) -> Any:
        """Return transformers' config of ``pretrained``; no weights are read.

        Raises:
            UserError: there is none, or it is of another kind than the recipe.
        """
        from transformers import AutoConfig

        path, key = Path(str(self.pretrained)).expanduser(), f"init_from={self.pretrained}"
        if path.is_file() and (path.parent / "config.json").is_file():
            raise UserError(f"{key} is one file of a model", f"init_from={shlex.quote(str(path.parent))}")
        if path.exists() and not os.path.lexists(path / "config.json"):
            if saved := [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]:  # of the hub's cache
                newest = max(saved, key=lambda file: (len(file.parent.name), file)).parent
                raise UserError(f"{key} has no config.json of its own", f"init_from={shlex.quote(str(newest))}")
            if what := defect(path):
                raise UserError(f"{key}: {path.name} {what}")
            raise UserError(
                f"{key} cannot be opened as a {self.name}: it has no config.json; load it into "
                f"transformers (merge adapters of peft into it), and give the folder that "
                "save_pretrained writes, with its tokenizer, as docs/finetune.md shows for nanoGPT's ckpt.pt"
            )
        with self._opening() as place:
            config = AutoConfig.from_pretrained(**place)
        self.check_type(config)
        if quantized := getattr(config, "quantization_config", None):
            method = quantized.get("quant_method", "some method") if isinstance(quantized, dict) else quantized
            raise UserError(f"{key} has weights that are quantized ({method}); give those in 32 or 16 bits")
        return config

    def _positions(self) -> int | None:
        """Return how many tokens the pretrained model takes; None: any number."""
        return positions_of(self.pretrained_config())

    def open_pretrained(self, cls: Any, vocabulary: int, **options: Any) -> Any:
        """Return the model of ``pretrained`` in fp32, its tables of token ids resized to ``vocabulary``.

        Rows that are added get the mean of the others. Their logits then lie where the others' do: the published
        GPT-2's are near -35, and a row of small random numbers, whose logit is near 0, would take all the probability.

        Args:
            cls: transformers' class of the model. A head that the source lacks is random.
            vocabulary: rows of the tables.
            options: of the config, such as dropout.

        Raises:
            UserError: it cannot be opened.
        """
        assert self.pretrained
        if torch.get_default_device().type == "meta" or is_kept(self.pretrained):  # only the shapes are needed
            config = self.pretrained_config()
            config._attn_implementation = self.attention
            config.update(options | {"vocab_size": vocabulary, "dtype": torch.float32})
            return cls(config)
        key = f"init_from={self.pretrained}"
        with self._opening() as place:
            model, head = load_whole(cls, key, place, attn_implementation=self.attention, **options)
        if head and not self.says_new_head:
            log.warning("%s: the head is new, %s", key, listed(head, "tensor"))
        known = model.config.vocab_size
        if vocabulary == known:
            return model
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
        with torch.no_grad():
            for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
                for table in layer.parameters(recurse=False):
                    table[known:] = table[:known].mean(0)
        return model

    def _opening(self) -> AbstractContextManager[dict[str, Any]]:
        """Give the arguments of ``from_pretrained``, whose errors become the user's."""
        key, failure = f"init_from={self.pretrained}", f"cannot be opened as a {self.name}"
        path = Path(str(self.pretrained)).expanduser()
        # An adapter records where its base model is, and may be opened from another folder.
        name = str(path.absolute()) if path.is_dir() else str(self.pretrained)
        return opening(name, key, failure, f"give a folder {WITH_WEIGHTS}")

    def adapt_weights(
        self, weights: dict[str, Tensor], model: Any, datasets: TextDatasets, about: dict[str, Any]
    ) -> tuple[dict[str, Tensor], list[Decision]]:
        """Return the weights with this model's padding of the vocabulary."""
        tables, vocabulary = token_tables(network_of(model)), datasets.vocabulary
        # A run on plain text has no tokens of a chat template.
        before = vocabulary - len(CHATML_TOKENS) * (datasets.tokenizer.chat_template == CHATML)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in tables or name not in weights:
                continue
            rows = weights[name]  # exported without padding, or those of a checkpoint with any padding
            if len(rows) in (before, vocabulary) or (not about and len(rows) > vocabulary):
                known = rows[:vocabulary]  # of the rest the mean of these, see ``open_pretrained``
                weights[name] = torch.cat([known, known.mean(0).expand(len(parameter) - len(known), *known.shape[1:])])
        return with_adapters(weights, model), []

    def export(self, model: Any, datasets: Any, folder: Path) -> None:
        """Write a folder that transformers' auto classes open, the tokenizer beside the weights.

        The padding of the vocabulary is not exported: nothing can predict an id that the tokenizer does not know.
        """
        folder.mkdir(parents=True, exist_ok=True)
        datasets.tokenizer.save(folder)
        if positions := positions_of(network_of(model).config):
            path = folder / "tokenizer_config.json"
            write_json(path, read_json(path) | {"model_max_length": positions})
        eos, chatml = datasets.tokenizer.token_id("eos_token"), datasets.tokenizer.chat_template == CHATML
        save_model(network_of(model), folder, datasets.vocabulary, eos, new_eos=chatml)
        if self.lora.rank:
            network_of(model).save_pretrained(folder / "adapter")  # the adapters alone, as peft reads them

    def summary_fields(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {"size": f"{quantity(parameters)} pretrained"} if self.pretrained else {}


def positions_of(config: Any) -> int | None:
    """Return how many tokens a model of transformers takes; None: any number, as T5, and XLNet, whose config has -1."""
    count: int | None = getattr(config, "max_position_embeddings", None)
    return count if count and count > 0 else None


def check_context(context: int | str, positions: int | None) -> None:
    """Raise UserError where samples are longer than a trained model takes; ``positions`` None: it takes any number."""
    if positions and isinstance(context, int) and context > positions:
        problem = f"recipe.context={context} is longer than the pretrained model's {positions}"
        raise UserError(problem, f"recipe.context={positions}")


def load_whole(
    cls: Any, key: str, place: Mapping[str, Any], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, list[str]]:
    """Return transformers' model, and the names of the weights of its head that are random, as none are there.

    Args:
        cls: transformers' class of the model.
        key: the option that named the weights, for messages.
        place: see ``opening``.
        dtype: of the model, fp32 or fp64.
        options: of the config.

    Raises:
        UserError: other weights are missing, are of another shape, of blocks or a head that config.json does not have,
            quantized, all 0, or not finite.
    """
    from transformers.utils import cached_file
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with quiet():  # what is wrong is said here
        # Transformers would load the weights in whatever dtype they were saved.
        model, found = cls.from_pretrained(
            **place, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if other := sorted(found["mismatched_keys"]):
        shapes = [f"{name} is {dimensions(there)}, not {dimensions(here)}" for name, there, here in other]
        raise UserError(
            f"{key}: {counted(len(other), 'tensor')} of another shape than config.json describes "
            f"({shortened(shapes, 2)})"
        )
    base, (inputs, outputs) = model.base_model, (model.get_input_embeddings(), model.get_output_embeddings())
    parts = (base, outputs, getattr(base, "pooler", None))  # that of BERT is a part of its heads alone
    body, head, pooler = (set() if part is None else {id(each) for each in part.parameters()} for part in parts)
    embedding = {id(each) for each in inputs.parameters()}
    owner = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    missing = sorted(found["missing_keys"])
    new = [name for name in missing if owner.get(name) not in (body - head - pooler) | embedding]
    if lost := [name for name in missing if name not in new]:
        raise UserError(f"{key}: {len(lost)} of {len(model.state_dict())} tensors are missing ({shortened(lost, 3)})")
    more = sorted(found["unexpected_keys"])
    described = {_NUMBER.sub("0", name) for part in (model, base) for name in part.state_dict()}
    if cut := [name for name in more if _NUMBER.sub("0", name) in described]:
        raise UserError(f"{key}: {listed(cut, 'tensor')} of blocks beyond those that config.json describes; correct it")
    if model.config.tie_word_embeddings and outputs and outputs.weight is not inputs.weight:
        raise UserError(
            f"{key}: the head has weights of its own, and config.json says that it has those of the embedding; "
            'set "tie_word_embeddings": false there'
        )
    # Transformers has made numbers of that dtype of whatever the files hold.
    folder = Path(cached_file(place["pretrained_model_name_or_path"], "config.json", revision=place["revision"])).parent
    files = [*folder.glob("model*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    saved = {name: each for file in files for name, each in open_file(file, key).items()}
    check_numbers({name: each for name, each in saved.items() if name.endswith("weight")}, key)  # of masks, any type
    if wrong := nonfinite(model.state_dict()):
        raise not_finite(wrong, key)
    if more:
        log.warning("%s: left out, as this model has no such part: %s", key, listed(more, "tensor"))
    return model, new


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers log nothing below errors in what runs inside."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def generated(network: Any, ids: Tensor, vocabulary: int, **options: Any) -> Tensor:
    """Return what transformers' ``generate`` makes of a text.

    Args:
        network: one of transformers' models that generate.
        ids: int64, 1 × tokens: the text, or the input of an encoder.
        vocabulary: number of token ids; the rows of padding above them are never drawn.
        options: of ``generate``, beside those that the network's own ``generation_config`` has.

    Returns:
        int64, 1 × tokens: the text and its continuation, or the output of the decoder.

    Raises:
        FloatingPointError: the network's outputs are not finite.
    """

    def mask_padding(_: Tensor, scores: Tensor) -> Tensor:
        # On a GPU a failed assert in torch.multinomial makes the process unable to use it again.
        if not scores[:, :vocabulary].max().isfinite():
            raise FloatingPointError("the model's outputs are not finite")
        scores[:, vocabulary:] = -math.inf
        return scores

    with quiet():
        output: Tensor = network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), logits_processor=[mask_padding], **options
        )
    return output


def network_of(model: Any) -> Any:
    """Return transformers' model in a recipe's."""
    return getattr(model, "network", model)
