"""What the user reads at the start and at the end of a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from mantissa.display import quantity, size
from mantissa.formats import FP32
from trainer.checkpoint import store as checkpoint
from trainer.config.step import EPOCH
from trainer.errors import RunError
from trainer.files import PRECISION_FILE, read_object, run_facts
from trainer.optim.ema import ExponentialMovingAverage
from trainer.optim.groups import LR_FACTOR
from trainer.precision.manifest import warning_if_slow
from trainer.recipe import Decision
from trainer.run_folder import RunFolder
from trainer.terminal import Rows, Terminal
from trainer.trainer import Trainer


def show_start(
    terminal: Terminal, trainer: Trainer, manifest: dict[str, Any], folder: Path, decisions: list[Decision]
) -> None:
    """Show what trains, what was chosen, and warn about what will not be as the user expects."""
    config, effective = trainer.config, manifest["effective"]
    slow = warning_if_slow(config.precision, trainer.hardware, effective["matmul_tflops"])
    for sentence in filter(None, [slow, *warnings(trainer, folder)]):
        terminal.warn(sentence)
    if not slow and (why := effective["slower_than_fp32"]):
        advise = f"python scripts/advise.py recipe={config.recipe.name} … measures it"
        terminal.note(f"note: {config.precision.mode} is about as slow as fp32 here, or slower: {why}; {advise}")
    title = folder.name + (f", resumed after step {trainer.step}" if trainer.step else "")
    terminal.block(title, start_rows(trainer, manifest, folder))
    if decisions:
        rows = [(f"{decision.key}={_shown(decision.value)}", decision.why) for decision in decisions]
        terminal.block("chosen automatically (override any of them)", rows)


def _shown(value: object) -> object:
    """Return fractions in a list with three digits, and anything else as it is."""
    if isinstance(value, list) and all(isinstance(number, float) for number in value):
        return f"[{', '.join(f'{number:.3g}' for number in value)}]"
    return value


def start_rows(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> Rows:
    """Return the start block: what trains, on what, in which precision, how the batch is made up, where it goes."""
    config, plan, hardware, batching = trainer.config, trainer.plan, trainer.hardware, trainer.plan.batching
    numbers = {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}
    parameters = f"{quantity(sum(numbers.values()))} parameters"
    if trainer.frozen:
        parameters += f", {quantity(sum(numbers[name] for name in trainer.frozen))} of them frozen"
    facts = ", ".join(
        f"{name} {value}" for name, value in config.recipe.summary_fields(trainer.model, trainer.datasets).items()
    )
    rows = [("recipe", f"{config.recipe.name}{f' ({facts})' if facts else ''}, {parameters}")]
    if source := run_facts(folder, "init_from"):
        step = "" if source["step"] is None else f", step {source['step']}"  # of another program's file
        rows.append(("weights", f"of {source['run']}{step}"))
    processes = f" × {batching.ranks} processes ({config.parallel.kind})" if batching.ranks > 1 else ""
    count = plan.steps * batching.batch_size / len(trainer.datasets.train)
    epochs = f"{count:.3g} epochs" if count >= 0.01 else "less than 0.01 epochs"
    factors = [group[LR_FACTOR] for group in trainer.optimizer.param_groups]
    tags = ", ".join(f"{name}={value}" for name, value in config.tags.items())
    lrs = dict.fromkeys(config.optimizer.lr * factor for factor in (min(factors), max(factors)))
    return [
        *rows,
        ("data", "; ".join(filter(None, [trainer.datasets.description, config.augment.effect()]))),
        ("precision", _precision(trainer, manifest["effective"])),
        ("device", f"{hardware.name} ({hardware.device}, {size(hardware.memory_bytes)}, {hardware.cpu_cores} cores)"),
        (
            "batch",
            f"{batching.batch_size} samples per step = {batching.accumulation} × "
            f"{batching.micro_batch_size}{processes}; {plan.steps} steps = {epochs}",
        ),
        (
            "optimizer",
            f"{config.optimizer.name}, lr {' to '.join(f'{lr:g}' for lr in lrs)}, schedule {config.schedule.kind}, "
            f"clip {config.clip.kind}, scaler {config.scaler.kind}, compile {config.compile.mode}, "
            f"state {config.optimizer.state}",
        ),
        ("evaluation", _evaluation(trainer)),
        ("output", str(folder)),
        *((name, text) for name, text in (("tags", tags), ("note", config.note)) if text),
    ]


def _precision(trainer: Trainer, effective: dict[str, Any]) -> str:
    """Return what was asked for and what computes, with its measured matmul throughput beside that of fp32."""
    precision, rates = trainer.config.precision, effective["matmul_tflops"]
    format_name = precision.format.number.name
    matmuls = f"matmuls run in {effective['matmul_dtype']}"
    if precision.half is None and trainer.hardware.is_gpu:
        matmuls += f" ({effective['fp32_in_cuda_matmul']} in matmul, {effective['fp32_in_cudnn_conv']} in convolutions)"
    beside = "" if format_name == FP32.name else f", fp32 {quantity(rates['fp32'])}"
    speed = f" (matmuls {quantity(rates[format_name])} TFLOP/s{beside})" if format_name in rates else ""
    parts = [
        f"requested {precision.mode}",
        matmuls,
        f"{effective['arithmetic']}{speed}",
        f"weights in {effective['weights_dtype']}, updated in {effective['optimizer_dtype']}",
    ]
    if layers := effective["scaled_modules"]:
        scaling = f" ({precision.fp8_scaling})" if precision.fp8_scaling else ""
        parts.append(f"in {format_name}{scaling}: {len(layers)} linear layers")
    if trainer.fp32_modules:
        parts.append(f"in fp32: {', '.join(trainer.fp32_modules)}")
    for option, operators in precision.operator_overrides.items():
        computed_in = {"fp32_ops": FP32.name, "half_ops": format_name}[option]
        parts.append(f"operators in {computed_in}: {', '.join(operators)}")
    return "; ".join(parts)


def warnings(trainer: Trainer, folder: Path) -> list[str]:
    """Return what will not be as the user expects: options without their effect, other kernels than before a resume."""
    found, plan = [], trainer.plan
    before = read_object(folder / PRECISION_FILE).get("effective")
    if isinstance(before, dict) and before.get("kernels") != trainer.kernels:
        found.append(
            "some 16-bit operators have other kernels than before the resume, because the processor, precision.kernels "
            "or the version differs: results differ by rounding"
        )
    samples, patience = len(trainer.datasets.train), trainer.config.early_stopping.patience
    if plan.batching.batch_size > samples:
        found.append(
            f"batch_size={plan.batching.batch_size} is more than the {samples} training samples, so a step repeats "
            "some; set a smaller batch_size"
        )
    if patience is not None and plan.evaluations < patience + 2:
        found.append(
            f"early_stopping.patience={patience} cannot end this run, which has {plan.evaluations} evaluations; set a "
            "smaller eval_every"
        )
    return found


def _evaluation(trainer: Trainer) -> str:
    """Return when what is evaluated, on how much."""
    config, plan = trainer.config, trainer.plan
    every, samples = len(trainer.datasets.valid), plan.eval_samples
    when = f"after each {EPOCH}" if config.eval_every == EPOCH else f"every {plan.eval_every} steps"
    text = f"{when}, {min(samples, every):,} of {every:,} samples"
    if isinstance(config.ema, ExponentialMovingAverage):
        text += f", of averaged weights (ema.decay={config.ema.decay})"
    if config.early_stopping.patience is not None:
        text += f"; ends after {config.early_stopping.patience} without an improvement"
    return text


def stop_message(signum: int, step: int, folder: RunFolder, enabled: bool, command: str) -> str:
    """Return what the user of a run reads that a signal stopped after ``step``; ``enabled``: it saves checkpoints."""
    stopped = f"stopped by {signal.Signals(signum).name} after step {step}"
    if not enabled:
        return f"{stopped}; nothing was saved (checkpoint=none)"
    saved = checkpoint.steps(folder.checkpoints)[-1:] == [step]
    kept = "saved" if saved else f"not saved. {last_good(folder)}"
    return f"{stopped}, {kept}. Resume with:\n  {command}"


def last_good(folder: RunFolder) -> str:
    """Return a sentence about the newest checkpoint."""
    saved = checkpoint.steps(folder.checkpoints)
    if not saved:
        return "No checkpoint was saved."
    return f"The last valid checkpoint is step {saved[-1]}, in {folder.checkpoints}"


def unfinished(missing: list[str], steps: int, folder: RunFolder, command: str) -> RunError:
    """Return the error of a run that has taken its steps and could not write all of its results."""
    finish = f"free disk space, then finish it with:\n  {command}"
    if not checkpoint.steps(folder.checkpoints):
        finish = "free disk space and start it again: it has no checkpoint"
    error = RunError(f"all {steps} steps are done, but {'; '.join(missing)}; {finish}")
    error.shared = True
    return error
