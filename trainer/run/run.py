"""One run: the loop over optimizer steps, what happens between two of them, and the end.

``Run._loop`` reads from top to bottom: next batch, step, log, evaluate, save, stop; ``Run.train`` is around it. What is
below is one thing each.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Any, ClassVar

from mantissa.display import finite
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.writer import CheckpointWriter, infinite_buffers
from trainer.config.commands import doctor_command
from trainer.config.settle import Plan
from trainer.data.contract import Batch, fingerprint
from trainer.data.evaluation import Progress
from trainer.errors import Interrupted, NonFiniteError, RunError, UserError, first_line
from trainer.files import MODE_PREFIX, PRECISION_FILE, SUMMARY_FILE, read_json, read_object, remove_folder, write_json
from trainer.parallel.world import World
from trainer.profiling.diagnostics import DiagnosticsSession
from trainer.profiling.profiler import ProfilerSession
from trainer.recipe import Decision, UserRecipe
from trainer.run import report
from trainer.run.export import export_best, load_best, whole_model
from trainer.run.monitor import Monitor, NonFiniteGradients
from trainer.run.provenance import git_facts
from trainer.run.record import forget_failure, observed, open_metric_log, options_of, record_failure, write_config
from trainer.run.scores import PREFIX, Score, Scores
from trainer.run.signals import Signals
from trainer.run.summary import results, unreadable_samples
from trainer.run.table import Table
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.tracking.log import MetricLog
from trainer.trainer import StepRecord, Trainer

log = logging.getLogger("mantissa")


class Run:
    """Trains to the last step: profiles, logs, evaluates, saves and stops.

    Every rank has one, because all of them have to evaluate, save and stop after the same steps. Only the
    one of rank 0 prints, logs and profiles. First it may be restored; then ``begin`` writes what is recorded of every
    run; then ``train``.

    Args:
        trainer: ready for its first step.
        scores: of its evaluations.
        folder: of the run, which this process has locked.
        terminal: what the user sees.
        signals: requests to stop or to save.
        began: when the command was given, on the monotonic clock.
        command: continues the run.
    """

    trainer_class: ClassVar[type[Trainer]] = Trainer

    def __init__(
        self,
        trainer: Trainer,
        scores: Scores,
        folder: RunFolder,
        terminal: Terminal,
        signals: Signals,
        began: float,
        command: str,
    ) -> None:
        config = trainer.config
        self.trainer, self.scores, self.config = trainer, scores, config
        self.world: World = trainer.world
        self.plan: Plan = trainer.plan
        self.folder, self.terminal, self.signals = folder, terminal, signals
        self.began, self.command = began, command
        self.fingerprint = fingerprint(trainer.datasets.train, trainer.datasets.valid)
        """Hash of the data, which must be the same on resume."""

        # What the steps leave behind.
        self.monitor = Monitor(trainer, terminal.warn)
        self.table = Table(terminal, self.plan, self.monitor)
        self.writer = CheckpointWriter(
            config.checkpoint, folder.checkpoints, self.world, infinite_buffers(trainer.model)
        )
        self.metric_log: MetricLog | None = None
        """Log of the metrics, from ``begin`` on; on rank 0 alone."""
        self.profiler, self.diagnostics = ProfilerSession(), DiagnosticsSession()
        self.git: dict[str, str] = {}

        # How it goes.
        self.has_stepped = False
        """Whether this process has taken a step."""
        self.stopped_by: int | None = None
        """The signal that ended training, as all ranks agreed."""
        self.failure: dict[str, Any] | None = None
        """The step that was not finite, see ``record_failure``."""
        self.spent_before: dict[str, Any] = {}
        """What earlier processes spent on this run, see ``totals``."""
        self._resumed_at: int | None = None

    def restore(self, saved: CheckpointReader) -> None:
        """Continue from a checkpoint.

        Raises:
            UserError: the data has changed since, or the checkpoint is not of this model.
        """
        if saved.progress["data"] != self.fingerprint:
            changed = self.trainer.datasets.facts().items() - saved.progress["facts"].items()
            was = [f"{name} were {saved.progress['facts'].get(name)}, now {now}" for name, now in sorted(changed)]
            differ = "; ".join(was) or "as many samples, with other content"
            raise UserError(
                f"resume: the data of {self.folder.path} has changed since its last checkpoint ({differ}); "
                "put the files back as they were, or start a new run without resume="
            )
        self.trainer.restore(saved)
        self.monitor.load_state_dict(saved.progress["monitor"])
        self.scores.load_state_dict(saved.scores)
        self._resumed_at = saved.step
        ended = read_object(self.folder.path / SUMMARY_FILE)  # has what followed the checkpoint, too
        self.spent_before = ended if ended.get("step") == saved.step else saved.totals
        if self.config.checkpoint.enabled:
            self.writer.prune()

    def begin(self, decisions: Sequence[Decision]) -> None:
        """Record the facts of this run, show them, and open the metric log.

        Args:
            decisions: the options that were chosen automatically.
        """
        trainer, config, folder = self.trainer, self.config, self.folder
        self.git = git_facts()
        manifest, self.monitor.utilisation = observed(trainer)
        if self.world.is_main:
            options = write_config(folder, config)
            report.show_start(self.terminal, trainer, manifest, folder.path, decisions)
            forget_failure(folder)
            written = self._write_manifest(manifest)
            self.metric_log = open_metric_log(trainer, folder.path, options, written, self.git, self._resumed_at)
            steps_left = self.plan.steps - trainer.step
            self.profiler = config.profiler.start(folder.path, trainer.device, trainer.ledger, steps_left)
        self._start_diagnostics()

    def train(self) -> dict[str, Any]:
        """Train to the last step and return the summary, which is also in summary.json.

        Raises:
            Interrupted: a signal stopped it, or came while a run that had taken all its steps was closed.
            NonFiniteError: training turned non-finite.
            RunError: all steps are taken, but the best weights or the summary could not be written; or
                ``debug`` expects another result.
        """
        trainer, monitor = self.trainer, self.monitor
        summary: dict[str, Any] = {}
        missing: list[str] = []
        verdict: str | None = None
        try:
            self.signals.ahead = f"finishing the step, {self._saving}"
            monitor.start()
            if trainer.step == 0 and self.config.init_from:
                self._evaluate_first()
            with closing(trainer.batches()) as batches:
                self._loop(batches)

            # All steps are taken, early stopping had enough, or a signal stopped it.
            monitor.collect()
            with self.terminal.work("writing the checkpoint"):
                self.writer.finish()
            if self.complete:
                verdict = self.config.debug.check(monitor.first_loss, monitor.last_loss, trainer.step)
                summary, missing = self._finish()
        except Interrupted as second:
            raise self._abandoned(second) from None
        except BaseException as error:
            advice = self._failed(error)
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(f"{error}. {advice}") from error
            raise
        if self.stopped_by is not None:
            raise self._stopped(self.stopped_by, complete=bool(summary))
        if self.world.all_reduce_max(len(missing)):
            raise report.unfinished(missing, trainer.step, self.folder, self.command)
        if verdict is not None:
            self.terminal.note(verdict)
        return summary

    def _loop(self, batches: Iterator[list[Batch]]) -> None:
        """Take steps until the run is complete, or a signal stops it."""
        trainer, monitor, saving = self.trainer, self.monitor, self.config.checkpoint
        first_step = "compiling the model" if self.config.compile.mode != "off" else "taking the first step"
        while not self.complete and self.stopped_by is None:
            # Another format, from the next step on.
            if not self.unevaluated and trainer.next_precision != trainer.precision:
                with monitor.paused():
                    self._change_format()

            if not self.unevaluated:  # else an earlier process was stopped between this step and its evaluation
                with nullcontext() if self.has_stepped else self.terminal.work(first_step):
                    # The next batch, outside of the profile: data in memory is not the step's memory.
                    microbatches = self._next(batches)

                    # One optimizer step.
                    with self._profiled():
                        record = self.step(microbatches)
                    self.has_stepped = True

                    # Log. Once per interval the host waits for the device, and not finite means the end.
                    self.log(record)

            # Has any rank been told to stop, or to save? Asked once, so that all of them do the same: what comes later
            # is seen by the evaluation, or after the next step.
            stop, save = self.world.all_reduce_max_each([self.signals.stop or 0, self.signals.take_save()])
            self.stopped_by = stop or None

            # Evaluate. A run that stops saves at once, and is evaluated when it is resumed.
            score = None
            if self.unevaluated and not stop:
                with monitor.paused():
                    score = self.evaluate()

            # Save: when it is due, what is the best so far, before a stop, and at the end.
            due = saving.due(trainer.step, score is not None, self.plan.save_every)
            due = due or self.complete or (score is not None and score.improved)
            if saving.enabled and (due or self.stopped_by or save):
                with monitor.paused():
                    self._save(score)
                if save:
                    self.terminal.note(f"step {trainer.step}/{self.plan.steps}  saved (requested by a signal)")

    # --- formats ---

    def _change_format(self) -> None:
        """Enter the format of ``precision.then``, and mark the step in the log, in MLflow and on the terminal."""
        trainer = self.trainer
        self._log_diagnostics()
        with self.terminal.work("changing the format"):
            trainer.enter(trainer.next_precision)
            manifest, self.monitor.utilisation = observed(trainer)
        if self.world.is_main:
            self._write_manifest(manifest)
        self._start_diagnostics()
        step, mode = trainer.step + 1, trainer.precision.mode
        self._append(step, {f"{MODE_PREFIX}{mode}": 1.0})
        self.terminal.note(f"from step {step} on: precision={mode}")

    def _write_manifest(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write precision.json, and return its content: of the run's first format, with that of ``then`` in it."""
        path = self.folder.path / PRECISION_FILE
        if self.trainer.is_changed:
            manifest = (read_object(path) or manifest) | {"then": manifest}
        write_json(path, manifest)
        return manifest

    def _start_diagnostics(self) -> None:
        trainer, half = self.trainer, self.trainer.precision.half
        self.diagnostics = self.config.diagnostics.start(trainer.model, trainer.update, half, self.world)

    # --- what the loop asks ---

    @property
    def unevaluated(self) -> bool:
        """Whether an evaluation is due after the last step that was taken."""
        return self.plan.evaluates(self.trainer.step) and self.scores.step != self.trainer.step

    @property
    def complete(self) -> bool:
        """Whether all steps are taken and evaluated, or early stopping has ended the run."""
        return not self.unevaluated and (self.trainer.step == self.plan.steps or self.scores.exhausted)

    def totals(self) -> dict[str, Any]:
        """Return what the run has spent so far, with what earlier processes spent on what it was resumed from."""
        spent = {
            "wall_time_s": time.monotonic() - self.began,  # from the start of the command
            "train_time_s": self.monitor.trained_s,  # without evaluation and saving
            "units": self.monitor.units,
        }
        return {key: value + (self.spent_before.get(key) or 0) for key, value in spent.items()}

    @property
    def _saving(self) -> str:
        return "then saving" if self.config.checkpoint.enabled else "without saving (checkpoint=none)"

    # --- next batch, step, log ---

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
            kept = checkpoint.steps(self.folder.checkpoints)  # else there is nothing to resume from
            how = f"{report.last_good(self.folder)}; resume with:\n  {self.command}" if kept else report.NOT_SAVED
            raise UserError(f"{error}. {how}") from error

    def _profiled(self) -> AbstractContextManager[None]:
        """Return the context of the next step, whose time does not count where it is profiled."""
        number = self.trainer.step + 1
        self.diagnostics.begin(number)
        if (profile := self.profiler.step(number)) is None:
            return nullcontext()
        self.monitor.leave_out()
        return profile

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Take one optimizer step. Overridden where steps are timed or traced."""
        return self.trainer.train_step(microbatches)

    def log(self, record: StepRecord) -> None:
        """Pass a step's record to the monitor, and log the metrics of an interval that it ends."""
        if metrics := self.monitor.add(record):
            self._log_diagnostics()
            self._append(record.step, metrics)
        self.table.progress(record.step, metrics)

    def _append(self, step: int, metrics: dict[str, float]) -> None:
        """Append a line to the metric log, which rank 0 has."""
        if self.metric_log:
            self.metric_log.append(step, metrics)

    def _log_diagnostics(self) -> None:
        """Log what was measured since; also before an evaluation and a checkpoint, where a run may be resumed."""
        for step, metrics in self.diagnostics.collect():
            self._append(step, metrics)

    # --- evaluate ---

    def _evaluate_first(self) -> None:
        """Show and log what the first weights achieve; no checkpoint holds them, so they are never the best.

        A signal may stop it; a run that is resumed evaluates them again.
        """
        with self.monitor.paused():
            metrics = self._interruptible("evaluating the first weights", "then ending the run", self.trainer.evaluate)
        if metrics is None:
            return
        self.scores.add_first(metrics)
        scores = {f"{PREFIX}{name}": value for name, value in metrics.items()}
        self._append(0, scores)
        self.table.row(0, scores)

    def evaluate(self) -> Score | None:
        """Evaluate, and show, log and return the result; None: a signal stopped it."""
        self._log_diagnostics()
        metrics = self._interruptible("evaluating", self._saving, self.trainer.evaluate)
        if metrics is None:
            return None
        step = self.trainer.step
        score = self.scores.add(step, metrics)
        self._append(step, self.scores.final)
        self.table.row(step, self.scores.final, score.improved and not self.scores.worse_than_before)
        return score

    def _interruptible(
        self,
        label: str,
        after: str,
        evaluate: Callable[[Progress, Callable[[], bool]], dict[str, float] | None],
    ) -> dict[str, float] | None:
        """Return the metrics of an evaluation, with its progress shown; None: a signal stopped it."""
        before, self.signals.ahead = self.signals.ahead, f"{label}: finishing the batch, {after}"
        with self.terminal.work(label, unit="batches") as advance:
            metrics = evaluate(advance, self._is_told_to_stop)
        self.signals.ahead = before
        return metrics

    def _is_told_to_stop(self) -> bool:
        """Return whether a signal requests a stop on any rank; every rank asks."""
        self.stopped_by = self.world.all_reduce_max(self.signals.stop or 0) or None
        return self.stopped_by is not None

    # --- save ---

    def _save(self, score: Score | None) -> None:
        self._log_diagnostics()
        rank = None if score is None else self.scores.rank(score)
        run = {"scores": self.scores.state_dict(), "totals": self.totals()} if self.world.is_main else None
        if self.trainer.step == self._resumed_at:
            self.writer.rate(self.trainer.step, rank, run)
            return
        with self.terminal.work("saving a checkpoint"):
            self.monitor.stalled(self.writer.save(self.trainer.state_dict(), self._progress(), rank, run))

    def _progress(self) -> dict[str, Any]:
        facts, options = self.trainer.datasets.facts(), options_of(self.config)
        return {"monitor": self.monitor.state_dict(), "data": self.fingerprint, "facts": facts, "options": options}

    # --- the ends ---

    def _finish(self) -> tuple[dict[str, Any], list[str]]:
        """Export the best weights, show the summary, finish the profile and the tracking.

        Returns the summary, empty where a signal stopped the test, and what could not be written, for example because
        the disk is full.
        """
        self.terminal.end_progress()
        self.signals.ahead = "finishing the run"
        self.profiler.finish()
        summary = self._summary("FINISHED")  # the export is no part of the run's memory

        # The best weights: on the test data, as files.
        best, test, missing = self.scores.best, {}, []
        step = load_best(self.trainer, self.folder, best, self.terminal)
        if self.trainer.datasets.test is not None:
            tested = self._interruptible("evaluating the test data", "then ending the run", self.trainer.test)
            if tested is None:
                return {}, []
            test = tested
        model = whole_model(self.trainer)
        if model is not None and best is not None and step is not None:
            missing = export_best(self.trainer, model, step, best, self.folder, self.terminal)

        # The summary, which says that the run is finished: after it, nothing is repeated on resume.
        summary |= {"status": "FAILED" if missing else "FINISHED", "test": finite(test)} | self.totals()
        summary["unreadable_samples"] = unreadable_samples(self.trainer)
        self.stopped_by = self.world.all_reduce_max(self.signals.stop or 0) or None
        self.signals.ahead = None  # nothing is lost where MLflow is not waited for
        try:
            if self.metric_log and not self._close_metric_log(summary["status"], summary):
                missing.append("summary.json could not be written")
            if self.world.is_main and not missing and self.config.checkpoint.keep == 0:
                remove_folder(self.folder.checkpoints)
        finally:  # MLflow, too, may be waited for no longer
            ledger = self.profiler.ledger
            profile = self.profiler.summary if ledger is None else ledger.text().rstrip()
            title, took_s = report.title(self.folder.path, self._resumed_at or 0), self.totals()["wall_time_s"]
            following = report.following(self.config, self.trainer.datasets, self.folder.path, self._address)
            report.show_end(self.terminal, title, took_s, summary, profile, following)
        return summary, missing

    def _abandoned(self, second: Interrupted) -> Interrupted:
        """Do nothing that takes time, and return what ends the run at a second signal."""
        self.terminal.end_progress()
        if self.metric_log:
            self.metric_log.abandon()
        return Interrupted(f"{second}. {report.last_good(self.folder)}", second.exit_code - 128)

    def _failed(self, error: BaseException) -> str:
        """Record why the run has failed, close it, and return where it can go on, and how the cause is found."""
        cause = self._record_failure(error) if isinstance(error, NonFiniteGradients) else ""
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        self._close(error.status if isinstance(error, RunError) else "FAILED", f"{kind}{first_line(error)}")
        return f"{report.last_good(self.folder)}{cause}"

    def _record_failure(self, error: NonFiniteGradients) -> str:
        """Record what is needed to find the cause; return the sentence with the command that does it."""
        step = error.failure["step"]
        self._append(step, error.metrics)  # the last line shows what went wrong
        self.table.progress(step, error.metrics)
        self.table.row(step)
        try:
            self.writer.finish()
            progress = self._progress() | {"monitor": self.monitor.state_before_failure()}
            self.failure = record_failure(error, self.trainer, self.folder, progress)
        except (Exception, Interrupted) as problem:  # it must not hide why the run failed
            log.warning("the step that failed was not recorded (%s)", first_line(problem))
        if isinstance(self.config.recipe, UserRecipe):  # the doctor has no recipe to take the step with
            return ""
        return f"\nFind the cause with:\n  {doctor_command(self.folder.path)}"

    def _stopped(self, number: int, complete: bool) -> Interrupted:
        """Close a run that a signal has stopped, and return what ends it; of a complete one, no sweep goes on."""
        if complete:
            name = signal.Signals(number).name
            return Interrupted(f"received {name} at the end of the run, which is complete", number)
        with suppress(Interrupted):  # a second Ctrl-C while MLflow is waited for
            self._close("KILLED", f"stopped by {signal.Signals(number).name}")
        saves = self.config.checkpoint.enabled
        return Interrupted(report.stop_message(number, self.trainer.step, self.folder, saves, self.command), number)

    def _close(self, status: str, why: str) -> None:
        """Write the summary of a run that did not get to its end, and why; finish the profile and the tracking."""
        self.terminal.end_progress()
        with suppress(Exception, Interrupted):  # what ended the run is reported already; a second Ctrl-C ends this wait
            self.writer.finish()
        self.profiler.finish()
        if self.metric_log:
            self._close_metric_log(status, self._summary(status, why))

    def _summary(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Return the content of summary.json so far, in plain JSON types.

        Args:
            status: MLflow's.
            error: why the run ended early.
        """
        return {
            "status": status,
            "error": error,
            "failure": self.failure,
            "run": self.folder.path.name,
            **results(self.trainer, self.scores, self.monitor, self.profiler.ledger),
            **self.totals(),
            "checkpoints": self.writer.facts(),  # since this process started or resumed the run
            "resume": self.command,
            "mlflow": self._address,
            "git": self.git,
        }

    @property
    def _address(self) -> str:
        """The address of the run in MLflow; empty: it has none yet."""
        return self.metric_log.run.address if self.metric_log else ""

    def _close_metric_log(self, status: str, summary: dict[str, Any]) -> bool:
        """Return whether the summary was written; it also gets what MLflow has, and the time that it was waited for."""
        assert self.metric_log is not None
        written, path = self.metric_log.close(status, summary), self.folder.path / SUMMARY_FILE
        if written:
            with suppress(OSError, ValueError):  # it stays as it was
                now = {"wall_time_s": self.totals()["wall_time_s"], "mlflow": self._address}
                write_json(path, read_json(path) | now)
        return written
