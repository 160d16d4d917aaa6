"""What the server of ``tests.forks`` has imported and done before it forks."""

from __future__ import annotations

import gc
import importlib
import threading

from tests import shortcuts
from tests.composing import compose_quickly
from trainer.config import compose
from trainer.tracking import store

IMPORTED = (
    *("torch._dynamo", "torch.distributed.run", "transformers.models.gpt2.modeling_gpt2", "trainer.run.start"),
    *("trainer.tracking.models", "mlflow.models", "sqlalchemy.dialects.sqlite"),
)

store.import_mlflow("sqlite:///x")
for module in IMPORTED:
    importlib.import_module(module)
compose_quickly()
shortcuts.take()
for recipe in sorted(path.stem for path in (compose.CONF / "recipe").glob("*.yaml")):
    compose.compose(
        [f"recipe={recipe}", "data=synthetic"]
    )  # imports them all, reads conf/, and the parser learns its grammar
conversions = importlib.import_module("transformers.conversion_mapping")
conversions.get_checkpoint_conversion_mapping("gpt2")  # compiles a thousand expressions
assert threading.active_count() == 1, threading.enumerate()
gc.freeze()
