"""The ``debug`` config group: short runs that find mistakes before a long one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.autograd import graph

from trainer.data.contract import Batch, Dataset, Datasets, SampleId
from trainer.errors import NonFiniteError, RunError, UserError, first_line, is_out_of_memory


@dataclass
class Debug:
    """The ``debug`` config group; this base is ``debug=none``."""

    kind: ClassVar[str] = "none"

    def datasets(self, datasets: Datasets, batch_size: int) -> Datasets:
        """Return what is trained and evaluated on.

        Args:
            datasets: of the recipe.
            batch_size: samples of an optimizer step.
        """
        return datasets

    def step(self) -> AbstractContextManager[object]:
        """Return the context of one optimizer step."""
        return nullcontext()

    def check(self, first: float, last: float, steps: int) -> str | None:
        """Check the result of a complete run, and return the verdict if there is one.

        Args:
            first: loss of the first step that this process took, over all ranks.
            last: the validation loss at the end.
            steps: optimizer steps done.

        Raises:
            RunError: the run did not do what this choice expects.
        """
        return None


@dataclass
class Fast(Debug):
    """``debug=fast``: two steps of everything. Its YAML sets the sizes."""

    kind: ClassVar[str] = "fast"


@dataclass
class Overfit(Debug):
    """``debug=overfit``: trains on the first batch only, which any correct model and loss can learn."""

    kind: ClassVar[str] = "overfit"
    target: float = 0.2
    """The last loss must be at most this fraction of the first."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise UserError(f"debug.target={self.target} must lie between 0 and 1, such as 0.2")

    def datasets(self, datasets: Datasets, batch_size: int) -> Datasets:
        """Return the first batch, for training and for validation."""
        first = FirstSamples(datasets.train, min(batch_size, len(datasets.train)))
        return replace(datasets, train=first, valid=first, test=None)

    def check(self, first: float, last: float, steps: int) -> str | None:
        if not last <= self.target * first:
            raise RunError(
                f"debug=overfit: after {steps} steps on one batch the loss is {last:.4g}, down from {first:.4g} at "
                f"the first step; expected at most {self.target * first:.4g} (debug.target={self.target}). Try more "
                "steps= or another optimizer.lr=; if neither helps, check the labels, the loss and what is trained"
            )
        return f"debug=overfit: passed, the loss of one batch fell from {first:.4g} to {last:.4g} in {steps} steps"


@dataclass
class Anomaly(Debug):
    """``debug=anomaly``: autograd's anomaly detection, which finds the first operation whose gradient is NaN."""

    kind: ClassVar[str] = "anomaly"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Raise NonFiniteError with the line of the forward pass."""
        with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("always")
            try:
                yield
            except RuntimeError as error:
                # torch warns of an operation that fails in the backward pass, with its line of the forward pass.
                where = [str(warning.message) for warning in caught if warning.filename == graph.__file__]
                if not where or is_out_of_memory(error):
                    raise
                raise NonFiniteError("\n".join([f"debug=anomaly: {first_line(error)}", *where])) from error


class FirstSamples:
    """The first samples of a dataset, with its other attributes."""

    def __init__(self, dataset: Dataset, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return self._count

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        return self._dataset.batch(samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of this object, while a worker process unpickles it
            raise AttributeError(name)
        return getattr(self._dataset, name)
