"""One run from config to summary: sets everything up, reacts between steps, and closes in good order."""

from __future__ import annotations

import math
import signal
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.generators import random_state, set_random_state
from trainer.checkpoint.restore import Saved, load
from trainer.checkpoint.saver import Saver, infinite_buffers
from trainer.config.schema import Config, Plan, flatten
from trainer.data.loader import fingerprint
from trainer.errors import Interrupted, NonFiniteError, RunError, UserError
from trainer.formats import loss
from trainer.hardware import Hardware, peak_memory_bytes
from trainer.parallel.world import World
from trainer.precision import attention, convolution
from trainer.precision.modes import formats
from trainer.profiling.energy import EnergyMeter
from trainer.profiling.profiler import Profiler
from trainer.recipe import Choice
from trainer.run import report
from trainer.run.folder import RunFolder
from trainer.run.monitor import Monitor
from trainer.run.provenance import git_facts, resume_command, versions
from trainer.run.report import RunSummary
from trainer.run.signals import Requests
from trainer.run.terminal import Terminal
from trainer.tracking.mlflow.datasets import dataset_facts
from trainer.tracking.mlflow.servable import forget_servable, try_servable
from trainer.tracking.mlflow.store import without_password
from trainer.tracking.tracker import Tracker
from trainer.trainer import StepRecord, Trainer


class Run:
    """Watches over a Trainer: profiles, logs, evaluates, saves, stops. The loop calls it; it never calls the loop.

    Every rank has one, because all of them have to stop for evaluation and saving at the same steps. Only rank 0's
    prints, logs and profiles.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        saved: Saved | None,
        terminal: Terminal,
        requests: Requests,
        choices: list[Choice],
    ) -> None:
        self.trainer = trainer
        self.world: World = trainer.world
        self.config: Config = trainer.config
        self.plan: Plan = trainer.plan
        self.hardware: Hardware = trainer.hardware
        self.folder = folder
        self.terminal = terminal
        self.requests = requests
        self.stopped_by: int | None = None
        """The signal that ended training, as all ranks agreed."""
        self.command = resume_command(folder.path)
        self.best: dict[str, float] | None = None
        self.final: dict[str, float] = {}
        self._missing: list[str] = []
        """What a run that has taken all its steps could not leave behind, for want of disk space for example."""
        self.began = time.time()
        self.saver = Saver(self.config.checkpoint, folder.checkpoints, self.world, infinite_buffers(trainer.model))
        self.monitor = Monitor(
            log_every=self.config.log_every,
            last_step=self.plan.steps,
            unit=self.config.recipe.unit,
            scaler=self.config.scaler,
            recovers=trainer.loss_scale.recovers,
            device=trainer.device,
            emit=self._emit,
            world=self.world,
        )
        self.energy = EnergyMeter(trainer.device)
        self.fingerprint = fingerprint(trainer.datasets)
        if saved is not None:
            self._restore(saved)
        self.git = git_facts()
        self.manifest = self.config.precision.manifest(self.hardware, trainer.fp32_modules)
        self.manifest["effective"] |= formats(trainer.model, trainer.optimizer) | self.config.parallel.effective()
        self.manifest["effective"] |= {"sdpa_allowed": attention.enabled(), "conv_in_fp32": trainer.conv_in_fp32}
        if trainer.device.type == "cuda":
            self.manifest["effective"]["sdpa_taken"] = trainer.attention_kernels()
        self.profiler = Profiler().start(folder.path, trainer.model, trainer.optimizer, trainer.device)
        self.tracker: Tracker | None = None
        if self.world.first:
            self._open(saved.step if saved else None, choices)

    def _open(self, resume_step: int | None, choices: list[Choice]) -> None:
        """Write down what this run is, show it, and start what watches it."""
        flat = flatten(self.config)
        flat["tracking.uri"] = flat["tracking.uri"] and without_password(flat["tracking.uri"])
        self.folder.write_config(flat)
        self._show_start(choices)
        self.folder.write("precision.json", self.manifest)
        self.folder.mark_launch()
        self.tracker = self._open_tracker(flat, resume_step)
        trainer = self.trainer
        self.profiler = self.config.profiler.start(self.folder.path, trainer.model, trainer.optimizer, trainer.device)

    def execute(self) -> dict[str, Any]:
        """Train to the end of the plan and return the summary.

        Raises:
            Interrupted: a signal stopped it, or came while a run that had taken all its steps was closed.
            NonFiniteError: training turned non-finite.
            RunError: all steps are taken, but the best weights or the summary could not be written.

        """
        self.requests.training = True
        summary: dict[str, Any] | None = None
        try:
            self.monitor.start()
            self.energy.start()
            self.trainer.fit(self)
            self.monitor.collect()
            self.saver.finish()
            if self.trainer.step == self.plan.steps:
                summary = self._finish()
        except Interrupted:  # a second signal: nothing that takes time any more
            self.terminal.end_progress()
            if self.tracker:
                self.tracker.abandon()
            raise
        except BaseException as error:
            self._close("FAILED")
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(f"{error}. {self._last_good()}") from error
            raise
        if summary is not None:
            if self.world.largest(len(self._missing)):
                raise self._unfinished()
            return summary
        assert self.stopped_by is not None
        with suppress(Interrupted):  # a second Ctrl-C while MLflow is waited for
            self._close("KILLED")
        stopped = f"stopped by {signal.Signals(self.stopped_by).name} after step {self.trainer.step}"
        if not self.config.checkpoint.enabled:
            raise Interrupted(f"{stopped}; nothing was saved (checkpoint=none)", self.stopped_by)
        saved = checkpoint.steps(self.folder.checkpoints)[-1:] == [self.trainer.step]
        kept = "saved" if saved else f"not saved. {self._last_good()}"
        raise Interrupted(f"{stopped}, {kept}. Go on with:\n  {self.command}", self.stopped_by)

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
        self.stopped_by, asked_to_save = self._asked()
        score = None
        improved = False
        if last or step % self.plan.eval_every == 0:
            with self.monitor.paused():
                score, improved = self._evaluate(step)
        every = self.config.checkpoint.every
        due = last or step % (self.plan.eval_every if isinstance(every, str) else every) == 0
        if self.config.checkpoint.enabled and (due or improved or self.stopped_by or asked_to_save):
            with self.monitor.paused():
                self._save(step, score)
            if asked_to_save:
                self.terminal.note(f"step {step}/{self.plan.steps}  saved, as a signal asked")
        return self.stopped_by is None

    def _asked(self) -> tuple[int | None, bool]:
        """Return which signal asked any rank to stop, and whether one asked for a checkpoint.

        Read once for each step: a signal that comes later is answered after the next one, by all ranks alike.
        """
        asked = self.world.largest(2 * (self.requests.stop or 0) + self.requests.take_save())
        return asked // 2 or None, bool(asked % 2)

    def _evaluate(self, step: int) -> tuple[float | None, bool]:
        """Evaluate; return the score if it is finite, and whether it is the best so far."""
        self.monitor.collect()
        self.final = {f"valid/{name}": value for name, value in self.trainer.evaluate().items()}
        if self.tracker:
            self.tracker.log(step, self.final)
        score = self.final[self.config.recipe.best_metric]
        improved = math.isfinite(score) and (self.best is None or score < self.best["value"])
        if improved:
            self.best = {"step": step, "value": score}
        shown = "  ".join(f"{name} {loss(value)}" for name, value in self.final.items())
        self.terminal.note(f"step {step}/{self.plan.steps}  {shown}{'  (best)' if improved else ''}")
        return score if math.isfinite(score) else None, improved

    def _save(self, step: int, score: float | None) -> None:
        self.monitor.collect()
        trainer = self.trainer
        trainer.synchronise_buffers()
        progress = {
            "best": self.best,
            "final": self.final,
            "loss_scale": trainer.loss_scale.state_dict(),
            "monitor": self.monitor.state_dict(),
            "data": self.fingerprint,
        }
        rng = random_state(trainer.device)
        self.monitor.stalled(
            self.saver.save(step, trainer.model, trainer.optimizer, progress, rng, score, trainer.masters)
        )

    def _restore(self, saved: Saved) -> None:
        saved.check_progress(self.monitor.state_dict(), self.trainer.loss_scale, self.trainer.optimizer)
        if saved.progress["data"] != self.fingerprint:
            raise UserError(
                f"resume: the data of {self.folder.path} has changed since its last checkpoint; "
                "put the files back as they were, or start a new run without resume="
            )
        rng = saved.rng(self.world.rank, self.trainer.device)
        saved.restore(self.trainer.model, self.trainer.optimizer, self.trainer.masters)
        self.trainer.loss_scale.load_state_dict(saved.progress["loss_scale"])
        self.trainer.step = saved.step
        self.monitor.load_state_dict(saved.progress["monitor"])
        self.best = saved.progress["best"]
        self.final = saved.progress["final"]
        if rng is not None:  # a rank that was not there before goes on with a seed of its own
            set_random_state(rng, self.trainer.device)

    def _emit(self, step: int, metrics: dict[str, float]) -> None:
        if self.tracker:
            self.tracker.log(step, metrics)
        self.terminal.progress(step, self.plan.steps, metrics, self.config.recipe.unit)

    def _open_tracker(self, flat: dict[str, Any], resume_step: int | None) -> Tracker:
        hardware = {f"hardware.{name}": value for name, value in self.hardware.facts().items()}
        tags = {
            "recipe": self.config.recipe.name,
            "precision": self.config.precision.mode,
            "precision.support": self.manifest["support"],
            "hardware": self.hardware.name,
            "parallel": self.config.parallel.kind,
            "processes": str(self.world.size),
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
            datasets=dataset_facts(self.config.data, self.trainer.datasets),
            resume_step=resume_step,
        )

    def _show_start(self, choices: list[Choice]) -> None:
        emulated = self.config.precision.warning(self.hardware, self.manifest["effective"]["matmul_time_over_fp32"])
        unwritten = convolution.warning(self.trainer.conv_in_fp32, self.folder.path / "precision.json")
        for sentence in filter(None, [emulated, unwritten]):
            self.terminal.warn(sentence)
        title = f"{self.folder.path.name}" + (f", resumed after step {self.trainer.step}" if self.trainer.step else "")
        self.terminal.block(title, report.start_rows(self.trainer, self.manifest, self.folder.path))
        if choices:
            self.terminal.block("chosen here (any of them can be typed)", report.choice_rows(choices))

    def _last_good(self) -> str:
        saved = checkpoint.steps(self.folder.checkpoints)
        if not saved:
            return "No checkpoint had been written yet."
        return f"The last good checkpoint is of step {saved[-1]}, in {self.folder.checkpoints}"

    def _close(self, status: str) -> None:
        """Write the summary of a run that did not get to its end; finish the profile and the tracking."""
        self.terminal.end_progress()
        with suppress(Exception, Interrupted):  # what ended the run is reported already; a second Ctrl-C ends this wait
            self.saver.finish()
        self.profiler.finish()
        if self.tracker:
            self.tracker.close(status, asdict(self._summary(status)))

    def _summary(self, status: str) -> RunSummary:
        """Return what the run amounts to so far."""
        config, monitor = self.config, self.monitor
        units_per_s, step_time_s = monitor.throughput() or (None, None)
        return RunSummary(
            status=status,
            run=self.folder.path.name,
            recipe=config.recipe.name,
            precision=config.precision.mode,
            seed=config.seed,
            step=self.trainer.step,
            steps=self.plan.steps,
            final={name: value if math.isfinite(value) else None for name, value in self.final.items()},
            best=self.best,
            unit=config.recipe.unit,
            units_per_s=units_per_s,
            step_time_s=step_time_s,
            energy_j=self.energy.joules(),
            units=monitor.units,
            peak_memory_bytes=peak_memory_bytes(self.trainer.device),
            memory_is="allocated on the GPU" if self.hardware.is_gpu else "resident in memory, the whole process",
            parallel=config.parallel.kind,
            processes=self.world.size,
            checkpoints=self.saver.facts(),
            skipped_steps=monitor.skipped_steps,
            wall_time_s=time.time() - self.began,
            resume=self.command,
            hardware=self.hardware.facts(),
            versions=versions(),
            git=self.git,
        )

    def _finish(self) -> dict[str, Any]:
        """Export the best weights, show and return the summary, finish the profile and the tracking."""
        self.terminal.end_progress()
        self.profiler.finish()
        before = self._summary("FINISHED")  # the export is no part of the run's time and memory
        last_word = self._finish_model()
        summary = replace(before, status="FAILED" if self._missing else "FINISHED")
        self.terminal.block("summary", summary.rows())
        ledger = self.profiler.ledger
        profile = self.profiler.summary if ledger is None else ledger.text().rstrip()
        for text in filter(None, [profile, last_word]):
            self.terminal.note(text)
        if self.tracker and not self.tracker.close(summary.status, asdict(summary)):
            self._missing.append("summary.json could not be written")
        self.terminal.note(f"\nrun folder {self.folder.path}; compare runs with: python scripts/ui.py")
        asked = self.world.largest(self.requests.stop or 0)
        if asked:  # whoever sent it is told, and a sweep must not begin another run
            raise Interrupted(f"{signal.Signals(asked).name} came at the end of the run, which is finished", asked)
        return asdict(summary)

    def _unfinished(self) -> RunError:
        """Return the error of a run that has taken its steps and could not write what it has to leave behind."""
        finish = f"free disk space, then finish it with:\n  {self.command}"
        if not checkpoint.steps(self.folder.checkpoints):
            finish = "free disk space and start it again: it has no checkpoint"
        error = RunError(f"all {self.plan.steps} steps are done, but {'; '.join(self._missing)}; {finish}")
        error.shared = True
        return error

    def _finish_model(self) -> str | None:
        """Load the best weights, export them, and let the recipe have its last word."""
        trainer, path = self.trainer, self.folder.path
        best = checkpoint.best_step(self.folder.checkpoints) if self.best is not None else None
        if best is not None:
            load(self.folder.checkpoints, best).restore(trainer.model, None)
        model = self.config.parallel.whole(trainer.model, trainer.build_model)
        if not self.world.first or model is None:
            return None
        if self.best is not None and self.config.checkpoint.enabled and best != self.best["step"]:
            instead = "" if best is None else f" (those of step {best} are exported)"
            self._missing.append(f"the best weights, of step {self.best['step']}, were not saved{instead}")
        exported = best is not None and self._export(model)
        model.eval()
        try:
            with torch.no_grad(), self.config.precision.autocast(trainer.device):
                if exported and best is not None and self.config.tracking.mlflow:
                    valid = trainer.datasets.valid
                    problem = try_servable(path, trainer.recipe, model, trainer.device, valid, best)
                    if problem:
                        self.terminal.warn(problem)
                return self.config.recipe.epilogue(model.to(trainer.device), trainer.device)
        except torch.OutOfMemoryError:  # trained in parts, it need not fit on one device
            self.terminal.warn("the finished model as a whole does not fit on the device; its last word is left out")
            return None

    def _export(self, model: nn.Module) -> bool:
        """Write ``best/``; tell whether it is whole."""
        path = self.folder.path
        forget_servable(path)  # it has the step of the weights that are replaced
        try:
            self.config.recipe.export(model, path / "best")
        except (OSError, SafetensorError) as error:
            self._missing.append(f"the best weights could not be exported to {path / 'best'} ({error})")
            return False
        return True
