"""An encoder and decoder of text as an MLflow model (transformers 5 has no pipeline for it any more).

Run by MLflow, never imported here.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class TextToText(PythonModel):
    """Writes the most probable tokens, one by one."""

    def load_context(self, context: Any) -> None:
        """Open the exported folder."""
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        best = context.artifacts["best"]
        self.tokenizer = AutoTokenizer.from_pretrained(best, local_files_only=True)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(best, local_files_only=True, dtype="float32").eval()

    @torch.no_grad()
    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> list[str]:
        """Return what the model writes for each text, with its sentinels: ``<extra_id_0>`` and so on.

        The texts are the only column of a table, which MLflow makes of a list; ``params`` may have ``max_new_tokens``.
        """
        texts = model_input.iloc[:, 0].tolist()
        written = []
        ends = {self.tokenizer.pad_token_id, self.tokenizer.eos_token_id}
        for text in texts:
            encoded = self.tokenizer(text, return_tensors="pt")
            ids = self.model.generate(**encoded, max_new_tokens=int((params or {}).get("max_new_tokens", 64)))[0]
            written.append(self.tokenizer.decode([id for id in ids.tolist() if id not in ends]))
        return written


set_model(TextToText())
