"""What the user reads at the start and at the end of a run."""

from __future__ import annotations

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

import mantissa
from mantissa.display import about, counted, duration, quantity, shortened, size
from mantissa.formats import BF16, FP8, FP32
from mantissa.names import format_name as format_name_of
from trainer.checkpoint import store as checkpoint
from trainer.config.commands import compare_command
from trainer.config.schema import Config
from trainer.errors import RunError, redacted
from trainer.files import BEST, PRECISION_FILE, command, read_object, run_facts
from trainer.hardware import NATIVE, Hardware
from trainer.optim.ema import ExponentialMovingAverage
from trainer.optim.groups import LR_FACTOR
from trainer.parallel.compile import missing
from trainer.precision.modes import automatic
from trainer.profiling.diagnostics import Numerics
from trainer.recipe import Decision, UserRecipe
from trainer.run.summary import rate_in_short, scores_in_short, summary_lines
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.trainer import Trainer


def _identity(hardware: Hardware, processes: int) -> str:
    """Return ``Mantissa 0.2.0 · torch 2.15.0 · Intel Xeon, 2 cores, AMX · 23.5 GiB``."""
    device = re.sub(r"\((R|TM)\)| Processor| CPU|@.*", "", hardware.name).strip()
    if not hardware.is_gpu:
        amx = ", AMX" if any(flag.startswith("amx") for flag in hardware.cpu_flags) else ""
        device += f", {counted(hardware.cpu_cores, 'core')}{amx}"
    device += f" × {processes} processes" if processes > 1 else ""
    memory = size(hardware.memory_bytes)
    return f"Mantissa {mantissa.__version__} · torch {torch.__version__} · {device} · {memory}"


def title(folder: Path, step: int) -> str:
    """Return the run's name, and where this process began."""
    return folder.name + (f", resumed after step {step}" if step else "")


def show_start(
    terminal: Terminal, trainer: Trainer, manifest: dict[str, Any], folder: Path, decisions: Sequence[Decision]
) -> None:
    """Show what trains, what was chosen, and warn about what will not be as the user expects."""
    config, batching = trainer.config, trainer.plan.batching
    rates = manifest["effective"]["matmul_tflops"]
    for sentence in warnings(trainer, folder):
        terminal.warn(sentence)
    rows = start_rows(trainer, manifest, folder, decisions)
    # What was said of the weights of ``init_from`` has a row of its own.
    options = [decision for decision in decisions if decision.key != "init_from"]
    chosen = {decision.key: (_shown(decision.value), decision.why) for decision in options}
    if chosen and not config.why:
        said = {"micro_batch_size"} if batching.accumulation == batching.ranks == 1 else {}  # by batch_size
        short = [f"{key.rpartition('.')[2]}={value}" for key, (value, _) in chosen.items() if key not in said]
        rows.append(("auto", Text(f"{' '.join(short)}   (--why)", "dim")))
    if faster := _faster(trainer, rates):
        rows.append(("faster", Text(faster, "dim")))
    terminal.note(_identity(trainer.hardware, trainer.world.size), "dim")
    terminal.block(title(folder, trainer.step), rows)
    if config.why:
        reasons = [(f"{key}={value}", why) for key, (value, why) in chosen.items()]
        terminal.block("chosen automatically (override any of them)", reasons)


def _shown(value: object) -> str:
    """Return a value as text, fractions in a list with three digits."""
    if isinstance(value, list) and all(isinstance(number, float) for number in value):
        return f"[{', '.join(f'{number:.3g}' for number in value)}]"
    return str(value)


def start_rows(
    trainer: Trainer, manifest: dict[str, Any], folder: Path, decisions: Sequence[Decision]
) -> list[tuple[str, str | Text]]:
    """Return what trains, from which weights, on what, in which precision, in which batches; no option's default."""
    config, plan = trainer.config, trainer.plan
    numbers = {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}
    facts = config.recipe.summary_fields(trainer.model, trainer.datasets)
    model = [f"{config.recipe.name} {facts.pop('size', '')}".rstrip()]
    model += [f"{name.replace('_', ' ')} {value}" for name, value in facts.items()]
    model.append(f"{quantity(sum(numbers.values()))} parameters")
    if trainer.frozen:
        model.append(f"{quantity(sum(numbers[name] for name in trainer.frozen))} of them frozen")
    source = run_facts(folder, "init_from")
    step = f", step {source['step']}" if source.get("step") is not None else ""  # else another program's file
    weights = [f"of {source['run']}{step}"] if source else []
    for key, value, why in decisions:
        if key == "init_from":
            weights.append(why if value == source.get("run") else f"{value}: {why}")
    epochs = quantity(plan.steps * plan.batching.batch_size / len(trainer.datasets.train))
    length = f"{counted(plan.steps, 'step')} · {epochs} epoch{'' if epochs == '1' else 's'}"
    rows: dict[str, str | Text | None] = {
        "model": ", ".join(model),
        "weights": "; ".join(weights),
        "data": "; ".join(filter(None, [trainer.datasets.description, config.augment.effect()])),
        "precision": _precision(trainer, manifest["effective"]),
        "batch": f"{_batch(trainer)} · {length}",
        "optimizer": _optimizer(trainer),
        "evaluation": _evaluation(trainer),
        "tags": ", ".join(f"{name}={value}" for name, value in config.tags.items()),
        "note": config.note,
    }
    return [(name, value) for name, value in rows.items() if value]


def _batch(trainer: Trainer) -> str:
    """Return ``16 × 64 tokens``, and where there are several, the microbatches and processes that it is made of."""
    batching, recipe, samples = trainer.plan.batching, trainer.config.recipe, trainer.first_samples()
    units, rest = divmod(recipe.count_units(samples), len(next(iter(samples.values()))))
    text = f"{batching.batch_size:,} samples" if rest else f"{batching.batch_size:,} × {units:,} {recipe.unit}"
    text = text.replace(" × 1 ", " ")
    if batching.accumulation > 1 or batching.ranks > 1:
        text += f" = {counted(batching.accumulation, 'microbatch')} of {batching.micro_batch_size}"
    return text + (f" × {batching.ranks} processes ({trainer.config.parallel.kind})" if batching.ranks > 1 else "")


def _precision(trainer: Trainer, effective: dict[str, Any]) -> Text:
    """Return what was asked for and what computes, with its measured matmul throughput beside that of fp32."""
    precision, rates, whole = trainer.precision, effective["matmul_tflops"], trainer.config.precision
    format_name = precision.format.number.name
    weights, updated, product = (
        " and ".join(map(format_name_of, effective[f"{name}_dtype"].split(", ")))
        for name in ("weights", "optimizer", "matmul")
    )
    parts = [precision.mode + (" autocast" if precision.format.autocast else "")]
    if precision.half is not None:
        parts[0] += f", {weights} weights" + ("" if updated == weights else f", updated in {updated}")
    elif trainer.hardware.is_gpu:
        parts.append(f"matmul {effective['fp32_in_cuda_matmul']}, convolution {effective['fp32_in_cudnn_conv']}")
    if product not in (format_name, format_name_of(precision.format.number.dtype)):
        parts.append(f"matmuls in {product}")
    ratio = rates.get(format_name, math.nan) / rates.get(FP32.name, math.nan)
    if format_name in rates:
        beside = "" if format_name == FP32.name else f", {about(ratio)}x fp32"
        parts.append(f"matmuls {quantity(rates[format_name])} TFLOP/s{beside}")
    if is_other := effective["arithmetic"] != f"{NATIVE} on this hardware":
        parts.append(effective["arithmetic"])
    for name, count in Counter(effective["scaled_modules"].values()).items():
        scaling = f" ({precision.fp8_scaling})" if name == FP8.name else ""
        parts.append(f"{name}{scaling}: {counted(count, 'linear layer')}")
    if precision.gradients:
        parts.append(f"their gradients in {precision.gradients}")
    if patterns := [name for name, mode in precision.modules.items() if mode == BF16.name]:
        parts.append(f"bf16: {shortened(patterns, 4)}")
    if trainer.fp32_modules:
        parts.append(f"fp32: {shortened(trainer.fp32_modules, 4)}")
    if precision.fp32_ops:
        parts.append(f"operators in fp32: {', '.join(precision.fp32_ops)}")
    if whole.then is not None:
        first = precision.mode == whole.mode
        parts.append(f"{whole.then} after step {whole.until}" if first else f"{whole.mode} up to step {whole.until}")
    text = Text(" · ".join(parts))
    text.stylize("yellow" if is_other or ratio < 1 else "bold green" if ratio > 1 else "", 0, len(precision.mode))
    return text


def _faster(trainer: Trainer, rates: dict[str, float]) -> str:
    """Return what a run in fp32 without torch.compile leaves unused of an NVIDIA GPU, and what to type; empty: nothing.

    ``rates``: measured, of matmuls, see ``matmul_rates``.
    """
    config, half = trainer.config, automatic(trainer.hardware)[0]
    ratio = rates.get(half, math.nan) / rates.get(FP32.name, math.nan)
    if config.precision.modes != (FP32.name,) or config.compile.mode != "off" or not ratio > 1:
        return ""
    off, compiled = ("", "") if missing(trainer.device) else (", torch.compile is off", " compile=default")
    return f"{half} matmuls are {about(ratio)}x as fast here{off}: precision=auto{compiled}"


def _optimizer(trainer: Trainer) -> str:
    """Return its name, learning rate and schedule, the clipping, and what is not the default."""
    config = trainer.config
    factors = [group[LR_FACTOR] for group in trainer.optimizer.param_groups]
    lrs = dict.fromkeys(f"{config.optimizer.lr * factor:g}" for factor in (min(factors), max(factors)))
    limit = getattr(config.clip, f"max_{config.clip.kind}", None)
    clip = "no clipping" if limit is None else f"clip {config.clip.kind} {limit:g}"
    others = {"scaler": config.scaler.kind, "compile": config.compile.mode, "state": config.optimizer.state}
    changed = [f"{name} {value}" for name, value in others.items() if value not in ("auto", "off")]
    return ", ".join([config.optimizer.name, f"lr {' to '.join(lrs)} {config.schedule.kind}", clip, *changed])


def warnings(trainer: Trainer, folder: Path) -> list[str]:
    """Return what will not be as the user expects: options without their effect, what a resume makes different."""
    sentences, plan = [], trainer.plan
    manifest = read_object(folder / PRECISION_FILE)
    before = (manifest.get("then", {}) if trainer.is_changed else manifest).get("effective")
    if isinstance(before, dict) and before.get("kernels") != trainer.kernels:
        sentences.append(
            "some 16-bit operators have other kernels than before the resume, because the processor, precision.kernels "
            "or the version differs: results differ by rounding"
        )
    if Path(trainer.config.output_dir).expanduser().resolve() != folder.parent.resolve():
        sentences.append(f"output_dir={trainer.config.output_dir} has no effect: the run continues in {folder}")
    if not trainer.config.checkpoint.enabled and trainer.config.checkpoint.every != "auto":
        sentences.append(f"checkpoint.every={trainer.config.checkpoint.every} has no effect with checkpoint=none")
    diagnostics = trainer.config.diagnostics
    if isinstance(diagnostics, Numerics) and diagnostics.every > plan.steps:
        sentences.append(f"diagnostics.every={diagnostics.every} is more than steps={plan.steps}: nothing is measured")
    scaled = trainer.config.precision.scaled
    if scaled and trainer.hardware.is_gpu and trainer.config.compile.mode == "off":
        sentences.append(
            f"{' and '.join(scaled)} without torch.compile scales and rounds in kernels of their own, so a "
            "step may well take longer than in bf16, however fast the matmuls are; set compile=default"
        )
    if stretched := _stretched(trainer):
        sentences.append(stretched)
    samples, patience = len(trainer.datasets.train), trainer.config.early_stopping.patience
    if plan.batching.batch_size > samples:
        sentences.append(
            f"batch_size={plan.batching.batch_size} is more than the {samples} training samples, so a step repeats "
            "some; set a smaller batch_size"
        )
    if patience is not None and plan.evaluations < patience + 2:
        sentences.append(
            f"early_stopping.patience={patience} cannot end this run, which has "
            f"{counted(plan.evaluations, 'evaluation')}; set a smaller eval_every"
        )
    return sentences


def _stretched(trainer: Trainer) -> str:
    """Return how another number of steps than before the resume changes the learning rate; empty: it does not."""
    now, schedule = trainer.plan.steps, trainer.config.schedule
    before = trainer.plan.recorded.get("steps", now)
    lrs = [f"{trainer.config.optimizer.lr * schedule.factor(trainer.step, steps):.1e}" for steps in (before, now)]
    if not trainer.step or lrs[0] == lrs[1]:
        return ""
    return f"the schedule now spans {counted(now, 'step')}, not {before:,}: lr {' → '.join(lrs)}"


def _evaluation(trainer: Trainer) -> str:
    """Return what is evaluated where it is not the weights, and what ends the run early."""
    ema, patience = trainer.config.ema, trainer.config.early_stopping.patience
    parts = [f"averaged weights (ema.decay={ema.decay})"] if isinstance(ema, ExponentialMovingAverage) else []
    if patience is not None:
        parts.append(f"ends the run after {patience} without an improvement")
    return "; ".join(parts)


def show_end(
    terminal: Terminal,
    title: str,
    took_s: float,
    summary: dict[str, Any],
    profile: str | None,
    following: Sequence[tuple[str, str]],
) -> None:
    """Show the result, what was profiled, where everything is, and what to do with it.

    Args:
        terminal: what the user sees.
        title: see ``title``.
        took_s: seconds of the whole run.
        summary: the content of summary.json.
        profile: of several lines, or of one; None: there is none.
        following: see ``following``.
    """
    took = duration(took_s)
    if terminal.brief:
        parts = (scores_in_short(summary), rate_in_short(summary), took)
        terminal.outcome(f"{title}  {' · '.join(filter(None, parts))}")
    done = f"\nDone in {took} (training {duration(summary['train_time_s'])})"
    terminal.block(done, [("", line) for line in summary_lines(summary)], "bold green")
    if profile:
        terminal.note(*((profile,) if "\n" in profile else (f"  {profile}", "dim")))
    terminal.note()
    for number, (what, about_it) in enumerate(following):
        line = f"{what:<26}" if about_it else what
        terminal.note(Text.assemble((line, "" if number else "bold"), f"  {about_it}" if about_it else ""))


def following(config: Config, datasets: Any, folder: Path, mlflow: str) -> list[tuple[str, str]]:
    """Return where the best weights and the run are, with a word on each, and the commands that go on from it.

    Args:
        config: of the run.
        datasets: of the run.
        folder: of the run.
        mlflow: the address of the run there; empty: it is not there.
    """
    lines = [(str(folder), ""), (mlflow, "in MLflow")]
    if (folder / BEST).exists():
        about_it = read_object(folder / BEST / "config.json")
        opens = "transformers" if "architectures" in about_it else about_it.get("library")
        lines[0] = (str(folder / BEST), f"opens in {opens}" if opens else "")
        if isinstance(config.recipe, UserRecipe):  # in the program that has it
            lines.append((f'safetensors.torch.load_model(model, "{folder}/{BEST}/model.safetensors")', ""))
        elif shown := config.recipe.shown_by(datasets):
            lines.append((command(shown[0], [f"run={folder}", *shown[1:]]), ""))
    lines.append((compare_command(folder, config), ""))
    if mlflow:
        # mlflow.set_tracking_uri, too, sets the variable; a shell may not have it later.
        uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        store = [f"uri={uri}"] * bool(uri and redacted(uri) == uri)  # a password is not shown
        lines.append((command("ui.py", store), ""))
    return [(line, about_it) for line, about_it in lines if line]


def stop_message(signum: int, step: int, folder: RunFolder, enabled: bool, command: str) -> str:
    """Return what the user of a run reads that a signal stopped after ``step``; ``enabled``: it saves checkpoints."""
    stopped = f"stopped by {signal.Signals(signum).name} after step {step}"
    if not enabled:
        return f"{stopped}; nothing was saved (checkpoint=none)"
    if not (saved := checkpoint.steps(folder.checkpoints)):
        return f"{stopped}; nothing was saved"
    kept = "saved" if saved[-1] == step else f"not saved. {last_good(folder)}"
    return f"{stopped}, {kept}. Resume with:\n  {command}"


NOT_SAVED = "No checkpoint was saved."


def last_good(folder: RunFolder) -> str:
    """Return a sentence about the newest checkpoint."""
    saved = checkpoint.steps(folder.checkpoints)
    if not saved:
        return NOT_SAVED
    return f"The last valid checkpoint is step {saved[-1]}, in {folder.checkpoints}"


def unfinished(missing: list[str], steps: int, folder: RunFolder, command: str) -> RunError:
    """Return the error of a run that has taken its steps and could not write all of its results."""
    finish = f"free disk space, then finish it with:\n  {command}"
    if not checkpoint.steps(folder.checkpoints):
        finish = "free disk space and start it again: it has no checkpoint"
    return RunError(f"all {steps} steps are done, but {'; '.join(missing)}; {finish}", shared=True)
