"""The best weights of a run as an MLflow model. MLflow stores this file with the model and runs it; nothing imports it.

Beside it are ``best/``, the exported weights, and ``serving/``: ``serving.json`` names the class below that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

LONGEST_ANSWER = 32
"""Tokens."""


class Predictor(PythonModel):
    """Answers with one of the classes below, in evaluation mode, in fp32."""

    def load_context(self, context: Any) -> None:
        """Build the model and load its weights."""
        best, serving = Path(context.artifacts["best"]), Path(context.artifacts["serving"])
        facts = json.loads((serving / "serving.json").read_text(encoding="utf-8"))
        self.answer = _KINDS[facts["predictor"]](best, facts)

    @torch.no_grad()
    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> Any:
        """Return the answers to a batch of inputs, a table or arrays; ``params`` go to the class that answers."""
        return self.answer(model_input, **(params or {}))


class _Text:
    """A model of transformers that continues or completes texts: the only column of a table, which MLflow makes."""

    kind: str
    """The class of transformers."""

    def __init__(self, best: Path, facts: dict[str, Any]) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(best, local_files_only=True)
        model = getattr(transformers, self.kind).from_pretrained(best, local_files_only=True, dtype="float32")
        self.model = model.eval()


class TextGeneration(_Text):
    """Continues each text, no longer than the model's context.

    It writes the most probable tokens one by one or, with ``do_sample``, draws them.
    """

    kind = "AutoModelForCausalLM"

    def __call__(self, table: pd.DataFrame, max_new_tokens: int = 64, do_sample: bool = False) -> list[str]:
        """Return each text with its continuation."""
        return [self._continue(text, max_new_tokens, do_sample) for text in table.iloc[:, 0]]

    def _continue(self, text: str, max_new_tokens: int, do_sample: bool) -> str:
        encoded = self.tokenizer(text, return_tensors="pt")
        given = encoded["input_ids"].shape[1]
        room = min(self.model.config.max_position_embeddings - given, int(max_new_tokens))
        if room < 1:
            return text
        pad = self.model.config.eos_token_id or 0
        ids = self.model.generate(**encoded, max_new_tokens=room, do_sample=do_sample, pad_token_id=pad)[0]
        return text + str(self.tokenizer.decode(ids[given:], skip_special_tokens=True))


class TextToText(_Text):
    """Writes the most probable tokens, one by one (transformers 5 has no pipeline for it any more)."""

    kind = "AutoModelForSeq2SeqLM"

    def __call__(self, table: pd.DataFrame, max_new_tokens: int = 64) -> list[str]:
        """Return what the model writes for each text, with its sentinels: ``<extra_id_0>`` and so on."""
        ends = {self.tokenizer.pad_token_id, self.tokenizer.eos_token_id}
        written = []
        for text in table.iloc[:, 0]:
            encoded = self.tokenizer(text, return_tensors="pt")
            ids = self.model.generate(**encoded, max_new_tokens=int(max_new_tokens))[0]
            written.append(self.tokenizer.decode([each for each in ids.tolist() if each not in ends]))
        return written


class QuestionAnswering(_Text):
    """The stretch of the passage with the highest sum of start and end scores (transformers 5 has no pipeline)."""

    kind = "AutoModelForQuestionAnswering"

    def __call__(self, table: Any) -> pd.DataFrame:
        """Return a table with the ``answer`` and its ``score``, the probability of its start times that of its end.

        The input is a table with the columns ``question`` and ``context``.
        """
        table = pd.DataFrame(table)
        pairs = zip(table["question"], table["context"], strict=True)
        return pd.DataFrame([self._find(question, text) for question, text in pairs], columns=["answer", "score"])

    def _find(self, question: str, text: str) -> tuple[str, float]:
        encoded = self.tokenizer(
            question,
            text,
            truncation="only_second",
            max_length=self.model.config.max_position_embeddings,
            return_offsets_mapping=True,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        places = encoded.pop("offset_mapping")[0].tolist()
        passage = torch.tensor([part == 1 for part in encoded.sequence_ids(0)])
        if not passage.any():
            return "", 0.0
        output = self.model(**encoded)
        start, end = (
            scores[0].masked_fill(~passage, -torch.inf).softmax(0)
            for scores in (output.start_logits, output.end_logits)
        )
        pairs = (start[:, None] * end[None, :]).triu().tril(LONGEST_ANSWER - 1)
        first, last = divmod(int(pairs.argmax()), len(end))
        return text[places[first][0] : places[last][1]], float(pairs.max())


class ImageClassifier:
    """A model of torchvision or timm. It scales to what evaluation took, takes the middle, normalises, classifies; an
    image of the model's size stays.
    """

    def __init__(self, best: Path, facts: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        self.config = json.loads((best / "config.json").read_text(encoding="utf-8"))
        arch, options = self.config["arch"], self.config["arch_options"]
        if arch.startswith("timm/"):
            model = import_module("timm").create_model(arch.removeprefix("timm/"), **options)
        else:
            model = import_module("torchvision").models.get_model(arch, **options)
        model.load_state_dict(load_file(best / "model.safetensors"))
        self.model = model.float().eval()

    def __call__(self, given: np.ndarray) -> pd.DataFrame:
        """Return a table with the ``label`` and its ``probability`` for each image: RGB, N × H × W × 3, uint8."""
        from torchvision.transforms.v2 import functional as images

        size = self.config["image_size"]
        pixels = torch.from_numpy(np.array(given)).permute(0, 3, 1, 2)
        if pixels.shape[2:] != (size, size):
            shorter_side = round(size / self.config["evaluated_part"])  # so that the middle is what was evaluated
            pixels = images.center_crop(images.resize(pixels, [shorter_side], antialias=True), [size, size])
        mean, std = (torch.tensor(self.config[name]).view(3, 1, 1) for name in ("mean", "std"))
        probability, best = self.model((pixels.float() / 255 - mean) / std).softmax(1).max(1)
        names = self.config["classes"]  # the head may have more outputs than the data has classes
        labels = [names[index] if index < len(names) else str(index) for index in best.tolist()]
        return pd.DataFrame({"label": labels, "probability": probability.double().numpy()})


class Forward:
    """Any recipe's model, built by the recipe, whose source is stored with it: the output of ``forward``."""

    def __init__(self, best: Path, facts: dict[str, Any]) -> None:
        from safetensors.torch import load_model

        of = facts["recipe"]
        recipe = getattr(import_module(of["module"]), of["class"])(**of["options"])
        self.model = recipe.build_model(SimpleNamespace(**of["datasets"])).eval()
        load_model(self.model, best / "model.safetensors", device="cpu")
        self.model.float()
        self.inputs = facts["inputs"]

    def __call__(self, given: Any) -> Any:
        """Return an array, or arrays by name.

        The input is an array where ``forward`` takes one, else arrays by the names of its parameters.
        """
        arrays = given if isinstance(given, dict) else {self.inputs[0]: given}
        output = self.model(**{name: torch.from_numpy(np.array(arrays[name])) for name in self.inputs})
        if isinstance(output, torch.Tensor):
            return output.numpy()
        return {name: value.numpy() for name, value in output.items() if isinstance(value, torch.Tensor)}


_KINDS: dict[str, Callable[[Path, dict[str, Any]], Callable[..., Any]]] = {
    "text_generation": TextGeneration,
    "text_to_text": TextToText,
    "question_answering": QuestionAnswering,
    "image_classifier": ImageClassifier,
    "forward": Forward,
}
set_model(Predictor())
