"""A causal language model as an MLflow model: texts in, continued texts out. Run by MLflow, never imported here.

``mlflow.transformers.load_model`` opens the same folder as a pipeline of transformers. This one also knows that a text
cannot become longer than the model's context.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class TextGeneration(PythonModel):
    """Writes the most probable tokens one by one or, with ``do_sample``, draws them."""

    def load_context(self, context: Any) -> None:
        """Open the exported folder."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        best = context.artifacts["best"]
        self.tokenizer = AutoTokenizer.from_pretrained(best, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(best, local_files_only=True, dtype="float32").eval()

    @torch.no_grad()
    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> list[str]:
        """Return each text with its continuation; ``params`` are ``max_new_tokens`` and ``do_sample``.

        The texts are the only column of a table, which MLflow makes of a list.
        """
        texts = model_input.iloc[:, 0].tolist()
        return [self._continue(text, **(params or {})) for text in texts]

    def _continue(self, text: str, max_new_tokens: int = 64, do_sample: bool = False) -> str:
        encoded = self.tokenizer(text, return_tensors="pt")
        room = self.model.config.max_position_embeddings - encoded["input_ids"].shape[1]
        if min(room, max_new_tokens) < 1:
            return text
        length = min(room, int(max_new_tokens))
        ids = self.model.generate(
            **encoded, max_new_tokens=length, do_sample=do_sample, pad_token_id=self.model.config.eos_token_id or 0
        )[0]
        return text + str(self.tokenizer.decode(ids[encoded["input_ids"].shape[1] :], skip_special_tokens=True))


set_model(TextGeneration())
