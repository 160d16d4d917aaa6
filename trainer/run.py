"""One run from config to summary: sets everything up, reacts between steps, and closes in good order."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, report
from trainer.config import Config, Plan, flatten
from trainer.console import Terminal
from trainer.data import fingerprint
from trainer.errors import Interrupted, NonFiniteError, UserError
from trainer.folder import RunFolder, check_writable
from trainer.hardware import Hardware, detect
from trainer.loop import StepRecord, Trainer
from trainer.mlflow_store import without_password
from trainer.monitor import Monitor
from trainer.provenance import git_facts, resume_command
from trainer.recipe import Choice
from trainer.signals import StopRequest
from trainer.tracking import Tracker


def train(config: Config, overrides: list[str] | None = None) -> dict[str, Any]:
    """Train what the config describes and return the summary that is also in summary.json.

    Args:
        config: as composed; its ``auto`` fields are resolved in place.
        overrides: the command line's overrides, for the command that resumes this run.

    Raises:
        UserError: the config, the data or the hardware cannot do this; nothing was written.
        NonFiniteError: training turned non-finite.
        Interrupted: a signal stopped the run after saving a checkpoint.

    """
    terminal = Terminal()
    hardware = detect(config.device)
    plan, choices = config.resolve(hardware)
    assert config.run_name is not None
    check_writable(config.output_dir)
    folder = RunFolder.find(config.resume, config.output_dir, config.run_name) if config.resume else None
    saved = None
    if folder is not None:
        folder.check_same(flatten(config))
        saved = checkpoint.load(folder.checkpoints)
        if saved.step >= plan.steps:
            terminal.note(f"{folder.path} has done its {saved.step} steps; steps={2 * saved.step} would go on")
            return {}
    trainer = Trainer(config, plan, hardware)
    if folder is None:
        folder = RunFolder.create(config.output_dir, config.run_name)
    with folder.locked():
        return Run(trainer, folder, saved, terminal, choices, overrides or []).execute()


class Run:
    """Watches over a Trainer: profiles, logs, evaluates, saves, stops. The loop calls it; it never calls the loop."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        saved: checkpoint.Saved | None,
        terminal: Terminal,
        choices: list[Choice],
        overrides: list[str],
    ) -> None:
        self.trainer = trainer
        self.config: Config = trainer.config
        self.plan: Plan = trainer.plan
        self.hardware: Hardware = trainer.hardware
        self.folder = folder
        self.terminal = terminal
        self.command = resume_command(overrides, folder.path)
        self.best: dict[str, float] | None = None
        self.final: dict[str, float] = {}
        self.stop = StopRequest()
        self.began = time.time()
        self.monitor = Monitor(
            log_every=self.config.log_every,
            last_step=self.plan.steps,
            unit=self.config.recipe.unit,
            scaler=self.config.scaler,
            recovers=trainer.loss_scale.recovers,
            device=trainer.device,
            emit=self._emit,
        )
        self.fingerprint = fingerprint(trainer.datasets)
        if saved is not None:
            self._restore(saved)
        self.git = git_facts()
        self.manifest = self.config.precision.manifest(self.hardware, trainer.fp32_modules)
        flat = flatten(self.config)
        flat["tracking.uri"] = flat["tracking.uri"] and without_password(flat["tracking.uri"])
        folder.write_config(flat)
        folder.write("precision.json", self.manifest)
        self._show_start(choices)
        self.tracker = self._open_tracker(flat, resume_step=saved.step if saved else None)
        self.profiler = self.config.profiler.start(folder.path, trainer.model, trainer.optimizer, trainer.device)

    def execute(self) -> dict[str, Any]:
        """Train to the end of the plan and return the summary."""
        try:
            with self.stop:
                self.monitor.start()
                self.trainer.fit(self)
                self.monitor.collect()
        except Interrupted:  # a second signal: nothing that takes time any more
            self.terminal.end_progress()
            raise
        except BaseException as error:
            self._close("FAILED")
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(f"{error}. {self._last_good()}") from error
            raise
        signal = self.stop.received
        if signal is None or self.trainer.step == self.plan.steps:
            return self._close("FINISHED")
        with suppress(KeyboardInterrupt):  # a second Ctrl-C while MLflow is waited for
            self._close("KILLED")
        stopped = f"stopped by {signal.name} after step {self.trainer.step}"
        if not self.config.checkpoint.enabled:
            raise Interrupted(f"{stopped}; nothing was saved (checkpoint=none)", signal)
        raise Interrupted(f"{stopped}, saved. Go on with:\n  {self.command}", signal)

    def step(self) -> AbstractContextManager[object]:
        """Return the profiler's context of the next step."""
        context = self.profiler.step(self.trainer.step + 1)
        if not isinstance(context, nullcontext):
            self.monitor.leave_out()
        return context

    def trained(self, record: StepRecord) -> None:
        """Hand a step's record to the monitor."""
        self.monitor.add(record)

    def between(self, trainer: Trainer) -> bool:
        """Evaluate and save when due; stop when asked."""
        step = trainer.step
        last = step == self.plan.steps
        improved = False
        if last or step % self.plan.eval_every == 0:
            with self.monitor.paused():
                improved = self._evaluate(step)
        every = self.config.checkpoint.every
        due = last or step % (self.plan.eval_every if isinstance(every, str) else every) == 0
        if self.config.checkpoint.enabled and (due or improved or self.stop.received):
            with self.monitor.paused():
                self._save(step)
        return self.stop.received is None

    def _evaluate(self, step: int) -> bool:
        self.monitor.collect()
        self.final = {f"valid/{name}": value for name, value in self.trainer.evaluate().items()}
        self.tracker.log(step, self.final)
        loss = self.final[self.config.recipe.best_metric]
        improved = math.isfinite(loss) and (self.best is None or loss < self.best["value"])
        if improved:
            self.best = {"step": step, "value": loss}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.final.items())
        self.terminal.note(f"step {step}/{self.plan.steps}  {shown}{'  (best)' if improved else ''}")
        return improved

    def _save(self, step: int) -> None:
        self.monitor.collect()
        trainer = self.trainer
        progress = {
            "best": self.best,
            "final": self.final,
            "loss_scale": trainer.loss_scale.state_dict(),
            "monitor": self.monitor.state_dict(),
            "data": self.fingerprint,
        }
        folder = self.folder.checkpoints
        rng = checkpoint.random_state(trainer.device)
        checkpoint.save(folder, step, trainer.model, trainer.optimizer, progress, rng)
        checkpoint.prune(folder, self.config.checkpoint.keep, int(self.best["step"]) if self.best else None)

    def _restore(self, saved: checkpoint.Saved) -> None:
        if saved.progress["data"] != self.fingerprint:
            raise UserError(
                f"resume: the data of {self.folder.path} has changed since its last checkpoint; "
                "put the files back as they were, or start a new run without resume="
            )
        saved.restore(self.trainer.model, self.trainer.optimizer)
        self.trainer.loss_scale.load_state_dict(saved.progress["loss_scale"])
        self.trainer.step = saved.step
        self.monitor.load_state_dict(saved.progress["monitor"])
        self.best = saved.progress["best"]
        self.final = saved.progress["final"]
        checkpoint.set_random_state(saved.rng, self.trainer.device)

    def _emit(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.terminal.progress(step, self.plan.steps, metrics, self.config.recipe.unit)

    def _open_tracker(self, flat: dict[str, Any], resume_step: int | None) -> Tracker:
        hardware = {f"hardware.{name}": value for name, value in self.hardware.facts().items()}
        tags = {
            "recipe": self.config.recipe.name,
            "precision": self.config.precision.mode,
            "precision.support": self.manifest["support"],
            "hardware": self.hardware.name,
            "mlflow.source.name": "scripts/train.py",
        }
        tags |= {name: str(value) for name, value in self.config.recipe.facts().items()}
        if self.git:
            tags |= {"mlflow.source.git.commit": self.git["commit"], "git.dirty": self.git["dirty"]}
        return Tracker(
            self.config.tracking,
            self.folder.path,
            experiment=self.config.recipe.name,
            run_name=self.folder.path.name,
            params=flat | hardware,
            tags=tags,
            resume_step=resume_step,
        )

    def _show_start(self, choices: list[Choice]) -> None:
        for message in filter(None, [self.config.precision.warning(self.hardware)]):
            self.terminal.warn(message)
        title = f"{self.folder.path.name}" + (f", resumed after step {self.trainer.step}" if self.trainer.step else "")
        self.terminal.block(title, report.start_rows(self.trainer, self.manifest, self.folder.path))
        if choices:
            self.terminal.block("chosen here (any of them can be typed)", report.choice_rows(choices))

    def _last_good(self) -> str:
        saved = checkpoint.steps(self.folder.checkpoints)
        if not saved:
            return "No checkpoint had been written yet."
        return f"The last good checkpoint is of step {saved[-1]}, in {self.folder.checkpoints}"

    def _close(self, status: str) -> dict[str, Any]:
        """Write the summary, finish the profile and the tracking; with a finished run, export and show the result."""
        self.terminal.end_progress()
        artifacts: list[Path | tuple[Path, str]] = [
            self.folder.path / name for name in ("config.yaml", "config.json", "precision.json")
        ]
        artifacts += [(path, "profile") for path in self.profiler.finish()]
        summary = report.summarise(self, status)
        if status == "FINISHED":
            last_word = self._finish_model(artifacts)
            self.terminal.block("summary", report.summary_rows(summary, self.config.recipe.unit))
            ledger = self.profiler.ledger
            profile = self.profiler.summary if ledger is None else ledger.text().rstrip()
            for text in filter(None, [profile, last_word]):
                self.terminal.note(text)
        self.tracker.finish(status, artifacts, summary)
        if status == "FINISHED":
            self.terminal.note(f"\nrun folder {self.folder.path}; compare runs with: python scripts/ui.py")
        return summary

    def _finish_model(self, artifacts: list[Path | tuple[Path, str]]) -> str | None:
        """Load the best weights, export them, and let the recipe have its last word."""
        model = self.trainer.model
        if self.config.checkpoint.enabled and self.best is not None:
            checkpoint.load(self.folder.checkpoints, int(self.best["step"])).restore(model, None)
            self.config.recipe.export(model, self.folder.path / "best")
            artifacts.append((self.folder.path / "best", "best"))
        model.eval()
        with torch.no_grad(), self.config.precision.autocast(self.trainer.device):
            return self.config.recipe.epilogue(model, self.trainer.device)
