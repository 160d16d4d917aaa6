"""Labels of texts, or of pairs of them, by any of transformers' models for sequence classification."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mantissa.display import shortened
from recipes.any_model import AnyModel
from recipes.bert import SPECIAL, TEMPLATE
from recipes.data.text.labelled import MULTIPLE, Encoding, LabelledDatasets, LabelledSource
from recipes.huggingface import positions_of
from recipes.lora import plain
from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError
from trainer.files import read_json, write_json
from trainer.recipe import Context, DataSource, Decision, LossOutput, Recipe, Sizes

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger("mantissa")


@dataclass
class TextClassifier(AnyModel):
    """The ``recipe=text_classifier`` config. A target is a text, which has one label or several."""

    name: ClassVar[str] = "text_classifier"
    known_sum = True
    masks_attention = True
    says_new_head = True
    rising = (*Recipe.rising, "exact_match")
    unit: ClassVar[str] = "tokens"
    task = "SEQUENCE_CLASSIFICATION"
    model_class = "AutoModelForSequenceClassification"
    cpu_sizes = Sizes(steps=200, batch_size=16, micro_batch_size=16)
    gpu_sizes = Sizes(steps=1000, batch_size=32, micro_batch_size=32)
    # Devlin et al. 2018 (appendix A.3): 5e-5, 3e-5 and 2e-5, batches of 16 and 32.
    fine_tuning_lr = 0.03
    least_context = 8
    context: int | str = "auto"
    """Most tokens of a text, or of a pair, special ones among them; longer ones are cut. auto: what the model takes, at
    most 512; 256 of a new model on a CPU."""

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Choose the model; once the data is open, say what becomes of its output layer."""
        recipe, decisions = super().resolve(context)
        if context.datasets is not None and self.pretrained and not context.recorded:
            decisions.append(Decision("init_from", self.pretrained, self._about_head(context.datasets)[1]))
        return recipe, decisions

    def datasets(self, data: DataSource, seed: int) -> LabelledDatasets:  # type: ignore[override]
        """Open the texts as token ids.

        Raises:
            UserError: the data has no labelled texts, or too few classes.
        """
        config = self.model_config()
        known = int(config.vocab_size) if self.pretrained else 0
        special = {role: text for role, text in SPECIAL.items() if role != "mask_token"}
        types = (getattr(config, "type_vocab_size", 0) or 0) > 1
        encoding = Encoding(self.pretrained, self.tokens_per_sample, special, TEMPLATE, types, known)
        datasets = self._text(data).labelled(encoding)
        if known and (new := datasets.tokenizer.vocab_size - known) > 0:
            about = f"{datasets.description}, {new} of the tokenizer's tokens are new to the model"
            return replace(datasets, description=about)
        return datasets

    def unfit(self, config: Any) -> str:
        if config.model_type not in self.classes():
            return "does not classify texts"
        new = config.is_encoder_decoder and not self.pretrained
        return "encodes one text and decodes another, which takes pretrained weights" if new else ""

    def _text(self, data: DataSource) -> Any:
        if not isinstance(data, LabelledSource):
            raise UserError(
                f"recipe={self.name} reads texts with labels, and data={data.kind} has none; set data=hub, and "
                "data.name to a hub id or a CSV, JSON or parquet file with a column of texts and one of labels"
            )
        return data

    def _about_head(self, datasets: LabelledDatasets) -> tuple[bool, str]:
        """Return whether the output layer of the pretrained model is kept, and why."""
        config = self.pretrained_config()
        if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
            return False, f"with a new head for {shortened(datasets.classes)}"
        before = list(config.id2label.values())
        if before == datasets.classes:
            return True, "its head is kept, which has these classes"
        if len(before) == len(datasets.classes) and before == [f"LABEL_{number}" for number in range(len(before))]:
            return True, f"its head is kept, whose outputs have no names: they are taken for {shortened(before)}"
        return False, f"with a new output layer: its classes are {shortened(before)}"

    def own_config(self, datasets: LabelledDatasets) -> dict[str, Any]:
        """Return the classes, and the tokenizer's special tokens: others may lie beyond the vocabulary."""
        first, last = (datasets.tokenizer.token_id(role) for role in ("cls_token", "sep_token"))
        ids = {"cls_token_id": first, "bos_token_id": first, "sep_token_id": last, "eos_token_id": last}
        labels = {"num_labels": len(datasets.classes), "pad_token_id": datasets.pad}
        return ids | labels

    def new_model(self, datasets: LabelledDatasets) -> Any:
        """Return transformers' model with an output for each class of the data."""
        network = super().new_model(datasets)
        config = network.config
        if self.pretrained and not self._about_head(datasets)[0]:
            name, layer = output_layer(network)
            new = nn.Linear(layer.in_features, len(datasets.classes), layer.bias is not None)
            network.set_submodule(name, new)
            network._init_weights(new)
        network.num_labels = len(datasets.classes)
        config.id2label = dict(enumerate(datasets.classes))
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = f"{'multi' if datasets.multi_label else 'single'}_label_classification"
        config.pad_token_id = datasets.pad  # by which decoders find the last token of a text
        config.use_cache = False
        self._check_padding(network, datasets.train)
        return network

    def _check_padding(self, network: Any, train: Any) -> None:
        """Warn where more padding after a text changes its logits, as of XLNet, which reads its last place.

        It is tried, as no property of transformers' classes tells it; on the meta device it is not.
        """
        batch = train.batch([SampleId(0, None)])
        if network.device.type == "meta" or batch["tokens"].shape[1] + MULTIPLE > train.length:
            return
        longer = {name: F.pad(batch[name], (0, MULTIPLE)) for name in batch if name != "label"}
        longer["tokens"][:, -MULTIPLE:] = train.pad
        mode = network.training
        network.eval()
        with torch.no_grad():
            logits, padded = _logits(network, batch), _logits(network, longer)
        network.train(mode)
        if (change := float((padded - logits).abs().max() / logits.abs().max())) > 1e-4:
            log.warning(
                "%s reads the padding after a text (%d more change a text's logits by %.1g of the largest): "
                "its label may depend on the texts beside it",
                type(network).__name__,
                MULTIPLE,
                change,
            )

    def build_model(self, datasets: LabelledDatasets) -> Any:
        """Build the model, and put the adapters into it, beside which all of its head is trained."""
        model = super().build_model(datasets)
        for parameter in head(model).values() if self.lora.rank else ():
            parameter.requires_grad = True
        return model

    def _positions(self) -> int | None:
        config = self.model_config()
        with torch.device("meta"):
            return positions(self.network_class()(config))

    def count_targets(self, batch: Batch) -> int:
        """Return the number of texts."""
        return len(batch["label"])

    def count_units(self, batch: Batch) -> int:
        """Return the number of tokens that are no padding."""
        return int(batch["mask"].sum())

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Add up the cross-entropies of the texts in fp32; of several labels, the mean over these."""
        label, logits = batch["label"], _logits(model, batch)
        given = logits.detach()
        if label.is_floating_point():
            loss = F.binary_cross_entropy_with_logits(logits, label, reduction="none").mean(1).sum()
            right, shares, name = ((given > 0) == (label > 0.5)).all(1), given.sigmoid(), "exact_match"
        else:
            loss = F.cross_entropy(logits, label, reduction="sum")
            right, shares, name = given.argmax(1) == label, given.softmax(1), "accuracy"
        sums = {name: right.sum(dtype=torch.float32)}
        return LossOutput(loss, sums, None if model.training else shares, label.long())

    def metrics(self, datasets: LabelledDatasets) -> dict[str, Metric]:
        """Return F1 and MCC, or mean average precision where texts have several labels; means over the classes."""
        from torchmetrics import classification

        from trainer.multi_label import MeanAveragePrecision, MeanF1

        classes = len(datasets.classes)
        if datasets.multi_label:
            return {"mAP": MeanAveragePrecision(classes), "f1_macro": MeanF1(classes)}
        f1 = classification.MulticlassF1Score(classes, validate_args=False)
        return {"f1_macro": f1, "mcc": classification.MulticlassMatthewsCorrCoef(classes, validate_args=False)}

    def adapt_weights(
        self, weights: dict[str, Tensor], model: Any, datasets: Any, about: dict[str, Any]
    ) -> tuple[dict[str, Tensor], list[Decision]]:
        """Return the weights, but a new output layer where the classes are others."""
        before = about.get("classes") or list(about.get("id2label", {}).values())
        if before == datasets.classes:
            return super().adapt_weights(weights, model, datasets, about)
        name, layer = output_layer(model)
        new = {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
        weights, decisions = super().adapt_weights(weights | new, model, datasets, about)
        why = f"new ({name}), as the classes of the run it starts from are {shortened(before)}"
        return weights, [*decisions, *([] if self.pretrained else [Decision("init_from", "output layer", why)])]

    def export(self, model: Any, datasets: LabelledDatasets, folder: Path) -> None:
        """Write a folder for transformers' ``pipeline("text-classification")``."""
        super().export(model, datasets, folder)
        path, network = folder / "tokenizer_config.json", model
        config = read_json(path)
        config.setdefault("pad_token", datasets.tokenizer.decode([datasets.pad]))
        if longest := positions(network):
            config["model_max_length"] = longest
        if datasets.types:
            config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        write_json(path, config)
        if self.lora.rank:
            _add_head(network, folder / "adapter")


def _logits(model: Any, batch: Batch) -> Tensor:
    types = {"token_type_ids": batch["types"]} if "types" in batch else {}
    logits: Tensor = model(input_ids=batch["tokens"], attention_mask=batch["mask"], **types).logits
    return logits.float()


def positions(network: Any) -> int | None:
    """Return how many tokens a model takes; None: any number."""
    count = positions_of(network.config)
    for name, module in network.named_modules():
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == count and "position" in name
        if count and is_table and module.padding_idx is not None:
            return count - module.padding_idx - 1  # RoBERTa's begins with rows that are no positions
    return count


def output_layer(network: Any) -> tuple[str, nn.Linear]:
    """Return the layer that has an output for each class, and its name: the last one beside the body."""
    body = {id(module) for module in network.base_model.modules()}
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return [(name, layer) for name, layer in layers if id(layer) not in body][-1]


def head(network: Any) -> dict[str, nn.Parameter]:
    """Return the parameters beside the body, by name."""
    body = {id(parameter) for parameter in network.base_model.parameters()}
    return {name: parameter for name, parameter in network.named_parameters() if id(parameter) not in body}


def _add_head(network: Any, folder: Path) -> None:
    """Write the head beside the adapters, where peft looks for modules that are trained as a whole."""
    file, path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    parts = {plain(name): tensor.detach().contiguous() for name, tensor in head(network).items() if "lora_" not in name}
    save_file(load_file(file) | {f"base_model.model.{name}": tensor for name, tensor in parts.items()}, file)
    modules = sorted({name.partition(".")[0] for name in parts})
    write_json(path, read_json(path) | {"task_type": "SEQ_CLS", "modules_to_save": modules})
