"""The format changes during a run: weights, optimizer, data order and generators go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.doctor.step import step_of
from inference.load import open_exported
from inference.run_config import configure
from mantissa.formats import FORMATS, FP32
from mantissa.step.flags import flags_of, fp32_flags
from mantissa.step.replay import Replay
from tests.helpers import BIGNET, GPT2, compose, copied, same_bits, trainer_of
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.store import Snapshot
from trainer.config.compose import compose as composed_on_record
from trainer.data.contract import Batch
from trainer.errors import NonFiniteError, UserError
from trainer.files import read_json, read_json_lines
from trainer.parallel.world import World
from trainer.precision.modes import Precision
from trainer.precision.scaled import converted
from trainer.run.forecast import forecast
from trainer.run.run import Run
from trainer.run.start import train
from trainer.trainer import StepRecord, Trainer

STEPS, UNTIL = 6, 3
RUN = (*GPT2, "recipe.dropout=0.1", f"steps={STEPS}", "deterministic=true", "ema=default")
PAIRS = [
    *(("fp32", "bf16"), ("bf16", "nvfp4"), ("nvfp4", "bf16")),
    *(("bf16", "fp16"), ("fp16", "bf16"), ("nvfp4", "mxfp8")),
]


def changing(first: str, then: str, *more: str) -> Trainer:
    return trainer_of(*RUN, f"precision={first}", f"precision.then={then}", f"precision.until={UNTIL}", *more)


def steps(trainer: Trainer, until: int = STEPS, folder: Path | None = None) -> list[Any]:
    """Each step's record and the state after it, up to a step; with a folder, a checkpoint of each, too."""
    batches, taken = trainer.batches(), []
    while trainer.step < until:
        taken.append((trainer.train_step(next(batches)), copied(trainer.state_dict())))
        if folder is not None:
            checkpoint.write(folder, Snapshot.of(trainer.state_dict(), {}, World()), None, World())
    return taken


def saved(folder: Path, step: int) -> CheckpointReader:
    return CheckpointReader(checkpoint.find_verified(folder, step))


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=[f"{a} {b}" for a, b in PAIRS])
def test_each_step_is_that_of_a_run_in_its_format(first: str, then: str, tmp_path: Path) -> None:
    """In the first format up to the change; from the same state on, in the second one after it."""
    if then == "mxfp8":
        pytest.importorskip("torchao", reason="torchao is optional")
    taken = steps(trainer := changing(first, then), folder=tmp_path)
    assert same_bits(taken[:UNTIL], steps(trainer_of(*RUN, f"precision={first}"), UNTIL))
    other = trainer_of(*RUN, f"precision={then}")
    scale = other.loss_scale.state_dict()
    other.restore(saved(tmp_path, UNTIL))
    other.loss_scale.load_state_dict(scale)  # a new one, where there is one
    assert same_bits(taken[UNTIL:], steps(other))
    assert trainer.precision.format is FORMATS[then]


@pytest.mark.parametrize("step", [UNTIL - 1, UNTIL, UNTIL + 1])
def test_a_resume_across_the_change_is_the_same_run(step: int, tmp_path: Path) -> None:
    whole = steps(changing("fp16", "nvfp4"), folder=tmp_path)
    resumed = changing("fp16", "nvfp4")
    resumed.restore(saved(tmp_path, step))
    assert resumed.precision.mode == ("fp16" if step <= UNTIL else "nvfp4")
    assert same_bits(steps(resumed), whole[step:])


@pytest.mark.parametrize("options", ["activation_checkpointing=blocks", "recipe.lora.rank=16"])
def test_recomputation_and_adapters_go_on(options: str, tmp_path: Path) -> None:
    taken = steps(changing("nvfp4", "fp32", options), UNTIL + 1, tmp_path)
    other = trainer_of(*RUN, "precision=fp32", options)
    other.restore(saved(tmp_path, UNTIL))
    assert same_bits(taken[UNTIL:], steps(other, UNTIL + 1))


@pytest.mark.parametrize(("first", "then"), [("fp32", "nvfp4"), ("nvfp4", "fp32")])
def test_options_of_one_format_have_no_effect_in_the_other(first: str, then: str) -> None:
    """fp32 islands are the same in both: in fp32 they change nothing."""
    own = ("precision.modules={h.0:fp32,h.1:bf16}", "precision.fp32_ops=[layer_norm]")
    trainer = changing(first, then, *own)
    islands = trainer.fp32_modules
    assert "gpt2.transformer.h.0" in islands
    for step in (UNTIL, UNTIL + 1):
        taken = steps(trainer, step)
        mode = trainer.precision.mode
        layers = converted(trainer.model)
        assert len(layers) == (8 if mode == "nvfp4" else 0)
        assert trainer.precision.fp32_ops == (["layer_norm"] if mode == "nvfp4" else None)
        if mode == "fp32" == first:
            assert same_bits(taken, steps(trainer_of(*RUN, "precision=fp32"), UNTIL))


def test_the_flags_of_fp32_products_are_those_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Precision, "check", lambda *_: None)  # a CPU has no TF32
    with flags_of(FP32):
        trainer, seen = changing("tf32", "bf16"), []
        for step in (UNTIL, UNTIL + 1):
            steps(trainer, step)
            seen.append(set(fp32_flags("cuda").values()))
    assert seen == [{"tf32"}, {"ieee"}]


def test_a_compiled_model_compiles_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's graph, and an evaluation's; torch makes no more than its limit of one function, unless it forgets."""
    graphs: list[tuple[int, bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((trainer.step, trainer.model.training))
        return graph

    monkeypatch.setattr("mantissa.step.compile.compile_in_place", lambda found, **_: found.compile(backend=backend))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        small = (*BIGNET, "recipe.width=32", f"steps={STEPS}", "compile=default", "eval_samples=4")
        change = ("precision=nvfp4", "precision.then=bf16", f"precision.until={UNTIL}")
        trainer = trainer_of(*small, *change)
        for step in range(1, STEPS + 1):
            steps(trainer, step)
            trainer.evaluate()
    assert graphs == [(0, True), (1, False), (UNTIL, True), (UNTIL + 1, False)]


def test_the_memory_is_forecast_for_the_format_that_needs_more() -> None:
    def peak(*overrides: str) -> int:
        return forecast(compose(*BIGNET, "recipe.width=32", "steps=4", *overrides)).peak_bytes

    low, high = peak("precision=bf16"), peak("precision=nvfp4")
    assert low < high
    for pair in (("bf16", "nvfp4"), ("nvfp4", "bf16")):
        assert peak(f"precision={pair[0]}", f"precision.then={pair[1]}", "precision.until=2") == high


def test_the_doctor_takes_a_step_in_its_format() -> None:
    trainer, formats = changing("fp16", "nvfp4"), []
    for step in (UNTIL - 1, UNTIL):
        steps(trainer, step)
        taken = step_of(trainer)
        formats.append((taken.number, taken.format.name, taken.scale, Replay.as_run(taken).format.name))
    assert formats == [(UNTIL, "fp16", 65536.0, "fp16"), (UNTIL + 1, "nvfp4", 1.0, "nvfp4")]


WHOLE = (*RUN, "run_name=it", "eval_every=1", "eval_samples=4", "log_every=4", "tracking=local", "device=cpu")


def test_a_run_marks_the_change_and_its_weights_know_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ("precision=nvfp4", "precision.then=bf16", "precision.until=0.5")
    summary = train(compose(*WHOLE, *change, "diagnostics=numerics", f"output_dir={tmp_path}")).summary
    lines = list(read_json_lines(tmp_path / "it" / "metrics.jsonl"))
    assert [line["step"] for line in lines if "precision/bf16" in line] == [UNTIL + 1]
    said = capsys.readouterr().out
    assert f"from step {UNTIL + 1} on: precision=bf16\n" in said
    assert said.count("diagnostics.every=50 is more than steps=6") == 1
    assert [summary[f"precision{name}"] for name in ("", "_then", "_until")] == ["nvfp4", "bf16", UNTIL]
    manifest = read_json(tmp_path / "it" / "precision.json")
    assert [each["requested"]["mode"] for each in (manifest, manifest["then"])] == ["nvfp4", "bf16"]
    assert [len(each["effective"]["scaled_modules"]) for each in (manifest, manifest["then"])] == [16, 0]
    facts = read_json(tmp_path / "it" / "best" / "precision.json")
    step = summary["best"]["step"]
    assert facts == {"precision": "nvfp4", "then": "bf16", "until": UNTIL, "step": step}
    # They are used in the format that they were evaluated in, unless another one is typed.
    best, modes = tmp_path / "it" / "best" / "precision.json", []
    for at in (step, UNTIL):
        best.write_text(json.dumps(facts | {"step": at}))
        for typed in ([], ["precision=fp32"]):
            exported = open_exported("it", tmp_path / "it")
            modes.append(configure(exported, [*typed, "device=cpu"]).config.precision.mode)
    assert modes == ["bf16", "fp32", "nvfp4", "fp32"]
    # Another share is refused.
    with pytest.raises(UserError, match=rf"cannot resume .*precision.until was {UNTIL}, now 7"):
        train(composed_on_record([f"resume={tmp_path / 'it'}", "precision.until=0.9", "steps=8"]))
    # Resumed after the change, the record still has both.
    again = train(compose(*WHOLE, *change, "steps=8", "resume=auto", f"output_dir={tmp_path}")).summary
    assert (again["step"], again["precision_until"]) == (8, UNTIL)
    assert read_json(tmp_path / "it" / "precision.json")["requested"]["mode"] == "nvfp4"


def test_the_best_weights_end_a_run_in_their_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the test data is evaluated, and a sample is written."""
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer, *_: {"loss": float(trainer.step), "perplexity": 1.0})
    change = ("precision=nvfp4", "precision.then=bf16", f"precision.until={UNTIL}", f"output_dir={tmp_path}")
    ended = train(compose(*WHOLE, *change))
    assert ended.summary["best"]["step"] == 1
    assert ended.run is not None
    assert len(converted(ended.run.trainer.model)) == 16
    assert ended.run.trainer.precision.mode == "nvfp4"


class Poisoned(Run):
    """The weights are infinite before the last step in the first format."""

    def step(self, microbatches: list[Batch]) -> StepRecord:
        record = super().step(microbatches)
        if record.step == UNTIL:
            return record._replace(skipped=torch.tensor(True), loss=torch.tensor(math.nan))
        return record


def test_what_ends_a_run_without_a_loss_scale_ends_it_before_a_format_with_one(tmp_path: Path) -> None:
    """Else it would count as a step that such a scale skips."""
    change = ("precision=bf16", "precision.then=fp16", f"precision.until={UNTIL}", f"output_dir={tmp_path}")
    with pytest.raises(NonFiniteError, match=f"step {UNTIL}: the gradients are not finite"):
        train(compose(*WHOLE, "log_every=50", "eval_every=50", *change), run_class=Poisoned)


@pytest.mark.parametrize(
    ("then", "why"), [("nvfp4", ": a side .* must be a multiple of 16"), ("tf32", " is not available on .*")]
)
def test_what_a_later_format_cannot_do_is_refused_at_the_start(then: str, why: str) -> None:
    """In words of ``precision.then``: another first format would not help."""
    refused = f"^precision.then={then}: precision={then}{why}; leave precision.then precision.until out$"
    with pytest.raises(UserError, match=refused):
        trainer_of(*BIGNET, "device=cpu", "precision=bf16", f"precision.then={then}", "precision.until=2")
