"""A model that finds answers in passages as an MLflow model (transformers 5 has no pipeline for it any more).

Run by MLflow, never imported here.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

LONGEST_ANSWER = 32
"""Tokens."""


class QuestionAnswering(PythonModel):
    """The stretch of the passage with the highest sum of start and end scores."""

    def load_context(self, context: Any) -> None:
        """Open the exported folder."""
        from transformers import AutoModelForQuestionAnswering, AutoTokenizer

        best = context.artifacts["best"]
        self.tokenizer = AutoTokenizer.from_pretrained(best, local_files_only=True)
        self.model = AutoModelForQuestionAnswering.from_pretrained(best, local_files_only=True, dtype="float32").eval()

    @torch.no_grad()
    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return a table with the ``answer`` and its ``score``, the probability of its start times that of its end.

        The input is a table with the columns ``question`` and ``context``.
        """
        table = pd.DataFrame(model_input)
        return pd.DataFrame(
            [self._answer(question, text) for question, text in zip(table["question"], table["context"], strict=True)],
            columns=["answer", "score"],
        )

    def _answer(self, question: str, text: str) -> tuple[str, float]:
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


set_model(QuestionAnswering())
