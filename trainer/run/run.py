"""One run: the loop over optimizer steps, what happens between two of them, and the end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

from mantissa.display import finite
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.writer import CheckpointWriter, infinite_buffers
from trainer.config.step import Plan
from trainer.data.contract import Batch, fingerprint
from trainer.data.evaluation import Watch
from trainer.errors import Interrupted, NonFiniteError, RunError, UserError, first_line
from trainer.files import PRECISION_FILE, SUMMARY_FILE, read_json, read_object, remove_folder, write_json
from trainer.parallel.world import World
from trainer.profiling.profiler import Profiler
from trainer.recipe import Decision, UserRecipe
from trainer.run import report
from trainer.run.export import export_best
from trainer.run.monitor import Monitor, NonFiniteGradients
from trainer.run.provenance import doctor_command, git_facts, resume_command
from trainer.run.record import forget_failure, observed, open_metric_log, record_failure, write_config
from trainer.run.scores import PREFIX, Score, Scores
from trainer.run.signals import Signals
from trainer.run.summary import run_summary, unreadable_samples
from trainer.run.table import Table
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.tracking.log import MetricLog
from trainer.trainer import StepRecord, Trainer

log = logging.getLogger("mantissa")


class EvaluationStopped(Exception):
    """A signal requested a stop during an evaluation, which has no result then."""


class Run:
    """Trains to the last step: profiles, logs, evaluates, saves and stops.

    Every rank has one, because all of them have to evaluate, save and stop after the same steps. Only the
    one of rank 0 prints, logs and profiles.
    """

    trainer_class: ClassVar[type[Trainer]] = Trainer

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        saved: CheckpointReader | None,
        terminal: Terminal,
        signals: Signals,
        decisions: list[Decision],
        began: float | None = None,
    ) -> None:
        """Restore the checkpoint, if there is one, and record the facts of this run.

        Args:
            trainer: ready for its first step.
            folder: of the run, which this process has locked.
            saved: the checkpoint that the run continues from; None: a new run.
            terminal: what the user sees.
            signals: requests to stop or to save.
            decisions: the options that were chosen automatically, to be shown.
            began: when the command was given, on the monotonic clock; None: now.
        """
        self.trainer = trainer
        self.world: World = trainer.world
        self.config = trainer.config
        self.plan: Plan = trainer.plan
        self.folder = folder
        self.terminal = terminal
        self.signals = signals
        self.stopped_by: int | None = None
        """The signal that ended training, as all ranks agreed."""
        self.command = resume_command(folder.path)
        self.scores = Scores(self.config, trainer.metrics.lower_is_better)
        self.failure: dict[str, Any] | None = None
        """The step that was not finite, see ``record_failure``."""
        self.begun = False
        """Whether this process has taken a step."""
        self.began = began or time.monotonic()
        self.before: dict[str, Any] = {}
        """What earlier processes spent on this run, see ``totals``."""
        masks = infinite_buffers(trainer.model)
        self.writer = CheckpointWriter(self.config.checkpoint, folder.checkpoints, self.world, masks)
        self.monitor = Monitor(
            log_every=self.config.log_every,
            last_step=self.plan.steps,
            unit=self.config.recipe.unit,
            scaler=self.config.scaler,
            recovers=trainer.loss_scale.recovers,
            device=trainer.device,
            world=self.world,
        )
        self.fingerprint = fingerprint(trainer.datasets.train, trainer.datasets.valid)
        self._resumed_at: int | None = None
        if saved is not None:
            self._restore(saved)
            if self.config.checkpoint.enabled:
                self.writer.prune()
        self.title = report.title(trainer, folder.path)
        self.table = Table(terminal, self.plan, self.monitor)
        self.git = git_facts()
        self.manifest, self.monitor.utilisation = observed(trainer)
        self.metric_log: MetricLog | None = None
        if self.world.is_main:
            options = write_config(folder, self.config)
            report.show_start(terminal, trainer, self.manifest, folder.path, decisions)
            write_json(folder.path / PRECISION_FILE, self.manifest)
            forget_failure(folder)
            self.metric_log = open_metric_log(trainer, folder.path, options, self.manifest, self.git, self._resumed_at)
        profiler = self.config.profiler if self.world.is_main else Profiler()
        self.profiler = profiler.start(folder.path, trainer.device, trainer.ledger, self.plan.steps - trainer.step)
        half = self.config.precision.half
        self.diagnostics = self.config.diagnostics.start(
            trainer.model, trainer.update, half, self.plan.steps, self.world
        )

    def train(self) -> dict[str, Any]:
        """Train to the last step and return the summary, which is also in summary.json.

        Raises:
            Interrupted: a signal stopped it, or came while a run that had taken all its steps was closed.
            NonFiniteError: training turned non-finite.
            RunError: all steps are taken, but the best weights or the summary could not be written.
        """
        try:
            self._take_steps()
            summary, missing = self._finish() if self.complete else ({}, [])
        except Interrupted as last:  # do nothing that takes time
            self.terminal.end_progress()
            if self.metric_log:
                self.metric_log.abandon()
            raise Interrupted(f"{last}. {report.last_good(self.folder)}", last.exit_code - 128) from None
        except BaseException as error:
            cause = self._record_failure(error) if isinstance(error, NonFiniteGradients) else ""
            self._close(error.status if isinstance(error, RunError) else "FAILED")
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(f"{error}. {report.last_good(self.folder)}{cause}") from error
            raise
        step = self.trainer.step
        if self.stopped_by is not None and summary:  # a sweep must not begin another run
            name = signal.Signals(self.stopped_by).name
            raise Interrupted(f"received {name} at the end of the run, which is complete", self.stopped_by)
        if self.stopped_by is not None:
            with suppress(Interrupted):  # a second Ctrl-C while MLflow is waited for
                self._close("KILLED")
            saves = self.config.checkpoint.enabled
            message = report.stop_message(self.stopped_by, step, self.folder, saves, self.command)
            raise Interrupted(message, self.stopped_by)
        if self.world.all_reduce_max(len(missing)):
            raise report.unfinished(missing, step, self.folder, self.command)
        if verdict := self.config.debug.check(self.monitor.first_loss, self.monitor.last_loss, step):
            self.terminal.note(verdict)
        return summary

    def _take_steps(self) -> None:
        """Take the steps that are left, or as many as signals allow, and write the last checkpoint."""
        self.signals.ahead = f"finishing the step, {self._saving}"
        self.monitor.start()
        beginning = "compiling the model" if self.config.compile.mode != "off" else "taking the first step"
        if self.trainer.step == 0 and self.config.init_from:
            self._evaluate_first()
        if self.unevaluated:  # the run was stopped before it came to that
            self.after_step()
        with closing(self.trainer.batches()) as batches:
            while not self.complete and self.stopped_by is None:
                with nullcontext() if self.begun else self.terminal.work(beginning):
                    self._take_step(batches)
                self.after_step()
        self.monitor.collect()
        with self.terminal.work("writing the checkpoint"):
            self.writer.finish()

    def totals(self) -> dict[str, Any]:
        """Return what the run has spent so far, with what earlier processes spent on what it was resumed from."""
        spent = {
            "wall_time_s": time.monotonic() - self.began,  # from the start of the command
            "train_time_s": self.monitor.trained_s,  # without evaluation and saving
            "units": self.monitor.units,
        }
        return {key: value + (self.before.get(key) or 0) for key, value in spent.items()}

    @property
    def complete(self) -> bool:
        """Whether all steps are taken and evaluated, or early stopping has ended the run."""
        return not self.unevaluated and (self.trainer.step == self.plan.steps or self.scores.exhausted)

    @property
    def unevaluated(self) -> bool:
        """Whether an evaluation is due after the last step that was taken."""
        return self.plan.evaluates(self.trainer.step) and self.scores.step != self.trainer.step

    def _take_step(self, batches: Iterator[list[Batch]]) -> None:
        microbatches = self._next(batches)  # not profiled: a dataset in memory is not part of the step's memory
        profiled = self.profiler.step(self.trainer.step + 1)
        if not isinstance(profiled, nullcontext):
            self.monitor.leave_out()
        self.diagnostics.begin(self.trainer.step + 1)
        with profiled:
            record = self.step(microbatches)
        self.begun = True
        self.log(record)

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Take one optimizer step. Overridden where steps are timed or traced, as ``log`` is."""
        return self.trainer.train_step(microbatches)

    def _next(self, batches: Iterator[list[Batch]]) -> list[Batch]:
        """Return the next step's microbatches; one process saves before a sample that cannot be read ends the run."""
        try:
            return next(batches)
        except UserError as error:
            if not self.trainer.step or not self.config.checkpoint.enabled:
                raise
            self.writer.finish()
            # Of several ranks, the others are in the next step and cannot save with this one.
            if self.world.size == 1 and checkpoint.steps(self.folder.checkpoints)[-1:] != [self.trainer.step]:
                self._save(None)
                self.writer.finish()
            raise UserError(f"{error}. {report.last_good(self.folder)}; resume with:\n  {self.command}") from error

    def log(self, record: StepRecord) -> None:
        """Pass a step's record to the monitor, and log the metrics of an interval that it ends."""
        if metrics := self.monitor.add(record):
            self._log_diagnostics()
            self._log(record.step, metrics)
        self.table.progress(record.step, metrics)

    def after_step(self) -> None:
        """Evaluate and save if due after a step, and check whether a signal requests a stop.

        A run that stops saves at once, and is evaluated when it is resumed.
        """
        step = self.trainer.step
        score = None
        # Read once here: a signal that comes later is handled by the evaluation or after the next step, by all ranks.
        stop, save = self.world.all_reduce_max_each([self.signals.stop or 0, self.signals.take_save()])
        self.stopped_by = stop or None
        if self.unevaluated and not stop:
            with self.monitor.paused(), suppress(EvaluationStopped):
                score = self._evaluate(step)
        due = self.config.checkpoint.due(step, score is not None, self.plan.save_every)
        due = self.complete or due or (score is not None and score.improved)
        if self.config.checkpoint.enabled and (due or self.stopped_by or save):
            with self.monitor.paused():
                self._save(score)
            if save:
                self.terminal.note(f"step {step}/{self.plan.steps}  saved (requested by a signal)")

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.metric_log:
            self.metric_log.append(step, metrics)

    def _log_diagnostics(self) -> None:
        for step, metrics in self.diagnostics.collect():
            self._log(step, metrics)

    def _evaluate_first(self) -> None:
        """Show and log what the first weights achieve; no checkpoint holds them, so they are never the best."""
        with self.monitor.paused(), self.terminal.work("evaluating the first weights", unit="batches") as advance:
            found = {f"{PREFIX}{name}": value for name, value in self.trainer.evaluate(advance).items()}
        self._log(0, found)
        self.table.row(0, found)

    def _evaluate(self, step: int) -> Score:
        """Evaluate, and show, log and return the result.

        Raises:
            EvaluationStopped: there is none.
        """
        self._log_diagnostics()  # as where a run stops here, and is evaluated when it is resumed
        with self._watched("evaluating", self._saving) as watch:
            score = self.scores.add(step, self.trainer.evaluate(watch))
        self._log(step, self.scores.final)
        self.table.row(step, self.scores.final, score.improved)
        return score

    @property
    def _saving(self) -> str:
        return "then saving" if self.config.checkpoint.enabled else "without saving (checkpoint=none)"

    @contextmanager
    def _watched(self, label: str, after: str) -> Iterator[Watch]:
        """Show the progress of an evaluation, and end it by ``EvaluationStopped`` where a signal requests that."""
        before, self.signals.ahead = self.signals.ahead, f"{label}: finishing the batch, {after}"
        with self.terminal.work(label, unit="batches") as advance:

            def watch(done: int, total: int) -> None:
                advance(done, total)
                if done < total and (stop := self.world.all_reduce_max(self.signals.stop or 0)):
                    self.stopped_by = stop
                    raise EvaluationStopped

            yield watch
        self.signals.ahead = before

    def _save(self, score: Score | None) -> None:
        self._log_diagnostics()  # else a run that is resumed from here would lack them
        rank = None if score is None else self.scores.rank(score)
        run = None
        if self.metric_log:
            run = {"scores": self.scores.state_dict(), "totals": self.totals()}
        if self.trainer.step == self._resumed_at:
            self.writer.rate(self.trainer.step, rank, run)
            return
        with self.terminal.work("saving a checkpoint"):
            self.monitor.stalled(self.writer.save(self.trainer.state_dict(), self._progress(), rank, run))

    def _progress(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict(), "data": self.fingerprint}

    def _record_failure(self, error: NonFiniteGradients) -> str:
        """Record what is needed to find the cause; return the sentence with the command that does it."""
        step = error.failure["step"]
        self._log(step, error.metrics)  # the last line shows what went wrong
        self.table.progress(step, error.metrics)
        self.table.row(step)
        try:
            self.writer.finish()
            self.failure = record_failure(error, self.trainer, self.folder, self._progress())
        except (Exception, Interrupted) as problem:  # it must not hide why the run failed
            log.warning("the step that failed was not recorded (%s)", first_line(problem))
        if isinstance(self.config.recipe, UserRecipe):  # the doctor has no recipe to take the step with
            return ""
        return f"\nFind the cause with:\n  {doctor_command(self.folder.path)}"

    def _restore(self, saved: CheckpointReader) -> None:
        if saved.progress["data"] != self.fingerprint:
            raise UserError(
                f"resume: the data of {self.folder.path} has changed since its last checkpoint; "
                "put the files back as they were, or start a new run without resume="
            )
        self.trainer.restore(saved)
        self.monitor.load_state_dict(saved.progress["monitor"])
        self.scores.load_state_dict(saved.progress)
        self._resumed_at = saved.step
        ended = read_object(self.folder.path / SUMMARY_FILE)  # has what followed the checkpoint, too
        self.before = ended if ended.get("step") == saved.step else saved.totals

    def _finish(self) -> tuple[dict[str, Any], list[str]]:
        """Export the best weights, show the summary, finish the profile and the tracking.

        Returns the summary, empty where a signal stopped the test, and what could not be written, for example because
        the disk is full.
        """
        self.terminal.end_progress()
        self.signals.ahead = "finishing the run"
        self.profiler.finish()
        summary = run_summary(self, "FINISHED")  # the export is no part of the run's memory
        try:
            test = partial(self._watched, "evaluating the test data", "then ending the run")
            epilogue, missing, scores = export_best(self.trainer, self.folder, self.scores.best, self.terminal, test)
        except EvaluationStopped:
            return {}, []
        summary |= {"status": "FAILED" if missing else "FINISHED", "test": finite(scores)} | self.totals()
        summary["unreadable_samples"] = unreadable_samples(self.trainer)
        ledger = self.profiler.ledger
        profile = self.profiler.summary if ledger is None else ledger.text().rstrip()
        self.stopped_by = self.world.all_reduce_max(self.signals.stop or 0) or None
        self.signals.ahead = None  # nothing is lost where MLflow is not waited for
        try:
            if self.metric_log and not self._close_metric_log(summary["status"], summary):
                missing.append("summary.json could not be written")
            if self.world.is_main and not missing and self.config.checkpoint.keep == 0:
                remove_folder(self.folder.checkpoints)
        finally:  # MLflow, too, may be waited for no longer
            report.show_end(self.terminal, self, summary, [*filter(None, [epilogue, profile])])
        return summary, missing

    def _close(self, status: str) -> None:
        """Write the summary of a run that did not get to its end; finish the profile and the tracking."""
        self.terminal.end_progress()
        with suppress(Exception, Interrupted):  # what ended the run is reported already; a second Ctrl-C ends this wait
            self.writer.finish()
        self.profiler.finish()
        if self.metric_log:
            self._close_metric_log(status, run_summary(self, status))

    def _close_metric_log(self, status: str, summary: dict[str, Any]) -> bool:
        """Return whether the summary was written; it also gets what MLflow has, and the time that it was waited for."""
        assert self.metric_log is not None
        written, path = self.metric_log.close(status, summary), self.folder.path / SUMMARY_FILE
        if written:
            with suppress(OSError, ValueError):  # it stays as it was
                now = {"wall_time_s": self.totals()["wall_time_s"], "mlflow": self.metric_log.run.address}
                write_json(path, read_json(path) | now)
        return written
