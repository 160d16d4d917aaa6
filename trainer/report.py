"""The words and figures of the start block, the summary table and summary.json."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.console import Rows, duration, loss, quantity, size
from trainer.hardware import peak_memory_bytes
from trainer.loop import Trainer
from trainer.provenance import versions
from trainer.recipe import Choice

if TYPE_CHECKING:
    from trainer.run import Run


def start_rows(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> Rows:
    """Return the start block: what trains, on what, in which precision, how the batch is made up, where it goes."""
    config, plan, hardware = trainer.config, trainer.plan, trainer.hardware
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    facts = ", ".join(f"{name} {value}" for name, value in config.recipe.facts().items())
    batching = plan.batching
    effective = manifest["effective"]
    precision = f"asked for {config.precision.mode}; products run in {effective['matmul_dtype']}"
    if config.precision.mode in ("fp32", "tf32") and hardware.is_gpu:
        precision += (
            f" ({effective['fp32_in_cuda_matmul']} in matmul, {effective['fp32_in_cudnn_conv']} in convolutions)"
        )
    precision += f", {manifest['support']} on this hardware"
    precision += f"; weights in {effective['weights_dtype']}, optimizer in {effective['optimizer_dtype']}"
    if layers := effective["fp8_modules"]:
        precision += f"; in fp8 ({config.precision.fp8_scaling}): {len(layers)} linear layers"
    if trainer.fp32_modules:
        precision += f"; in fp32: {', '.join(trainer.fp32_modules)}"
    processes = f" × {batching.ranks} processes ({config.parallel.kind})" if batching.ranks > 1 else ""
    epochs = plan.steps * batching.batch_size / len(trainer.datasets.train)
    return [
        (
            "recipe",
            f"{config.recipe.name}{f' ({facts})' if facts else ''}, {quantity(parameters)} parameters",
        ),
        ("data", f"{trainer.datasets.description}"),
        ("precision", precision),
        (
            "device",
            f"{hardware.name} ({hardware.device}, {size(hardware.memory_bytes)}, {hardware.cpu_cores} cores)",
        ),
        (
            "batch",
            f"{batching.batch_size} samples a step = {batching.accumulation} × {batching.micro_batch_size}{processes}; "
            f"{plan.steps} steps = {_epochs(epochs)}",
        ),
        (
            "optimizer",
            f"{config.optimizer.name}, lr {config.optimizer.lr:g}, schedule {config.schedule.kind}, "
            f"clip {config.clip.kind}, scaler {config.scaler.kind}, compile {config.compile.mode}",
        ),
        ("output", str(folder)),
    ]


def choice_rows(choices: list[Choice]) -> Rows:
    """Return one row for every ``auto`` that was resolved, as the override that would set it."""
    return [(f"{choice.key}={choice.value}", choice.why) for choice in choices]


def summarise(run: Run, status: str) -> dict[str, Any]:
    """Return the content of summary.json: plain JSON types, times in seconds, memory in bytes."""
    throughput = run.monitor.throughput()
    finite = {name: value if math.isfinite(value) else None for name, value in run.final.items()}
    return {
        "status": status,
        "run": run.folder.path.name,
        "recipe": run.config.recipe.name,
        "precision": run.config.precision.mode,
        "seed": run.config.seed,
        "step": run.trainer.step,
        "steps": run.plan.steps,
        "final": finite,
        "best": run.best,
        "unit": run.config.recipe.unit,
        "units_per_s": throughput[0] if throughput else None,
        "step_time_s": throughput[1] if throughput else None,
        # Of training and evaluation since this process began or went on, and of one rank's GPU.
        "energy_j": run.energy.joules(),
        "units": run.monitor.units,
        "peak_memory_bytes": peak_memory_bytes(run.trainer.device),
        "memory_is": "allocated on the GPU" if run.hardware.is_gpu else "resident in memory, the whole process",
        "parallel": run.config.parallel.kind,
        "processes": run.world.size,
        "checkpoints": run.saver.facts(),
        "skipped_steps": run.monitor.skipped_steps,
        "wall_time_s": time.time() - run.began,
        "resume": run.command,
        "hardware": run.hardware.facts(),
        "versions": versions(),
        "git": run.git,
    }


def summary_rows(summary: dict[str, Any], unit: str) -> Rows:
    """Return the summary table."""
    rows = [(name.removeprefix("valid/") + " (validation)", loss(value)) for name, value in summary["final"].items()]
    if summary["best"]:
        rows.append(("best loss", f"{loss(summary['best']['value'])} at step {summary['best']['step']:.0f}"))
    if summary["units_per_s"]:
        rows.append(("throughput", f"{quantity(summary['units_per_s'])} {unit}/s"))
        rows.append(("step time", f"{quantity(1e3 * summary['step_time_s'])} ms"))
    rows.append(("peak memory", f"{size(summary['peak_memory_bytes'])} {summary['memory_is']}"))
    rows.append(("skipped steps", str(summary["skipped_steps"])))
    rows.append(("time", duration(summary["wall_time_s"])))
    return rows


def _epochs(count: float) -> str:
    return f"{count:.3g} epochs" if count >= 0.01 else "less than 0.01 epochs"
