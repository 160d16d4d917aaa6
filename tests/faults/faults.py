"""Faults that the tests must catch: each is one edit of the source, with the lowest tests that then fail.

``python tests/faults/run.py`` plants them one at a time. An anchor is the shortest text that names what is edited.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


class DoesNotApply(Exception):
    """The source no longer holds the text that a fault replaces."""


@dataclass(frozen=True)
class Fault:
    """One edit, and who must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """As pytest takes them; a test of several parameters without them."""

    def __init__(self, name: str, file: str, old: str, new: str, *tests: str) -> None:
        for key, value in (("name", name), ("file", file), ("old", old), ("new", new), ("tests", tests)):
            object.__setattr__(self, key, value)

    def planted(self, project: Path = PROJECT) -> str:
        """Return the source with the fault.

        Raises:
            DoesNotApply: the text is not there exactly once, or the edit changes no code.
        """
        source = (project / self.file).read_text(encoding="utf-8")
        if (count := source.count(self.old)) != 1:
            raise DoesNotApply(f"{self.file} has {count} times {self.old!r}")
        edited = source.replace(self.old, self.new)
        if ast.dump(ast.parse(edited)) == ast.dump(ast.parse(source)):
            raise DoesNotApply(f"{self.file}: the edit changes no code")
        return edited


SCALER, UPDATE, TRAINER = "trainer/precision/scaler.py", "trainer/optim/update.py", "trainer/trainer.py"
SCHEDULE, EMA, MASTERS = "trainer/optim/schedule.py", "trainer/optim/ema.py", "trainer/optim/masters.py"
GROUPS, LOADER, MONITOR = "trainer/optim/groups.py", "trainer/data/loader.py", "trainer/run/monitor.py"
STORE, WRAP, STATISTICS = "trainer/checkpoint/store.py", "trainer/parallel/wrap.py", "mantissa/statistics.py"
EVALUATION, MIXING, JUDGE = (
    "trainer/data/evaluation.py",
    "recipes/data/images/mixing.py",
    "evidence/comparison/judge.py",
)
DETERMINISM, FORMATS = "trainer/determinism.py", "mantissa/formats.py"

OPTIM, DATA, PARALLEL = "tests/trainer/optim", "tests/trainer/data/test_data.py", "tests/parallel/test_gradients.py"
OF_SCALER, OF_UPDATE = "tests/trainer/precision/test_scaler.py", f"{OPTIM}/test_update.py"
OF_MASTERS, OF_SCHEDULE = f"{OPTIM}/test_masters.py", f"{OPTIM}/test_schedule.py"
OF_MIXING, OF_CHECKPOINT = "tests/recipes/vision/test_mixing.py", "tests/trainer/checkpoint/test_checkpoint.py"
OF_STATISTICS, OF_JUDGE = "tests/mantissa/test_statistics.py", "tests/evidence/test_judge.py"
OF_MONITOR, OF_FORMATS = "tests/trainer/run/test_monitor.py", "tests/mantissa/test_formats.py"

FAULTS = (
    # Loss scaling
    Fault(
        "the scale grows one step early",
        SCALER,
        "good_steps == self.config.interval",
        "good_steps == self.config.interval - 1",
        f"{OF_SCALER}::test_growth_comes_after_interval_good_steps_in_a_row",
    ),
    Fault(
        "the scale backs off by the inverse of its growth",
        SCALER,
        "scale * self.config.backoff",
        "scale / self.config.growth",
        f"{OF_SCALER}::test_dynamic_scale_is_grad_scalers_bit_for_bit",
    ),
    Fault(
        "an overflow does not start the count of good steps again",
        SCALER,
        "(self.good_steps + 1) * finite",
        "self.good_steps + finite",
        f"{OF_SCALER}::test_growth_comes_after_interval_good_steps_in_a_row",
    ),
    Fault(
        "the count of good steps is not restored",
        SCALER,
        'self.good_steps.fill_(state["good_steps"])',
        "self.good_steps.zero_()",
        f"{OF_SCALER}::test_restored_state_continues",
    ),
    Fault(
        "a step with an overflow is taken",
        UPDATE,
        "elif not self.read(skipped):",
        "elif self.read(skipped) is not None:",
        f"{OF_UPDATE}::test_one_infinite_element_is_enough",
    ),
    Fault(
        "without a loss scale a later good step is taken",
        UPDATE,
        "self._blocked | overflow",
        "overflow",
        "tests/parity/test_nonfinite.py::test_without_a_loss_scale_the_update_and_all_later_ones_are_blocked",
    ),
    Fault(
        "gradients are clipped before they are unscaled",
        UPDATE,
        "        if self._unscales_in_place and factor is not None:",
        "        if self._unscales_in_place:\n"
        "            self.clip.apply(gradients, self._total_norm(gradients, None))\n"
        "        if self._unscales_in_place and factor is not None:",
        f"{OF_UPDATE}::test_clip_norm_is_torchs_on_the_unscaled_gradients",
    ),
    # Clipping
    Fault(
        "every tensor is clipped by a norm of its own",
        UPDATE,
        "torch._foreach_mul_(gradients, self._coefficient(norm))",
        "[each.mul_(self._coefficient(torch.linalg.vector_norm(each))) for each in gradients]",
        f"{OF_UPDATE}::test_clip_norm_is_torchs_on_the_unscaled_gradients",
    ),
    Fault(
        "values are clipped on one side",
        UPDATE,
        "(gradients, -self.max_value)",
        "(gradients, -math.inf)",
        f"{OF_UPDATE}::test_clip_value_is_torchs_on_the_unscaled_gradients",
    ),
    Fault(
        "16-bit values are clipped by their scaled size",
        UPDATE,
        "self.max_value / factor",
        "torch.full_like(norm, self.max_value)",
        f"{OF_MASTERS}::test_pure_fp16_gradients_are_clipped_by_their_true_size",
    ),
    # The normaliser of the loss, accumulation
    Fault(
        "the loss is a mean of the microbatches' means",
        TRAINER,
        "output.loss_sum / divisor",
        "output.loss_sum / max(1, self.recipe.count_targets(microbatch)) / len(microbatches)",
        "tests/parity/test_accumulation.py::test_microbatches_do_not_change_gradient_or_loss",
    ),
    Fault(
        "a rank normalises by its own targets",
        TRAINER,
        "targets, units = self.world.sums(*self.count(microbatches))",
        "targets, units = self.count(microbatches)",
        f"{PARALLEL}::test_gradient_loss_norm_and_score_are_those_of_one_process",
    ),
    Fault(
        "a master keeps the last microbatch's gradient only",
        MASTERS,
        "master.grad.add_(weight.grad)",
        "master.grad.copy_(weight.grad)",
        f"{OF_MASTERS}::test_microbatches_add_up_in_fp32",
    ),
    Fault(
        "microbatches of a step add up in 16 bits",
        MASTERS,
        "if not backward.exchanged:",
        "if backward.exchanged:",
        f"{OF_MASTERS}::test_microbatches_add_up_in_fp32",
    ),
    # Data
    Fault(
        "a resumed run begins at another position",
        LOADER,
        "first_step * self.batch_size",
        "first_step * self.micro_batch_size",
        f"{DATA}::test_starting_at_a_step_gives_the_tail_of_starting_at_the_first",
    ),
    Fault(
        "every epoch has the same order",
        LOADER,
        "default_rng((self.seed, epoch))",
        "default_rng((self.seed, 0))",
        f"{DATA}::test_every_epoch_is_a_permutation_of_its_own",
    ),
    Fault(
        "all ranks get the same samples",
        LOADER,
        "islice(microbatches, self.rank, None",
        "islice(microbatches, 0, None",
        f"{PARALLEL}::test_a_step_takes_the_same_samples_whatever_the_number_of_processes",
    ),
    # Generators
    Fault(
        "numpy's position is not restored",
        DETERMINISM,
        "int(position), int(has_gauss)",
        "624, int(has_gauss)",
        f"{OF_CHECKPOINT}::test_generators_continue_where_they_were",
    ),
    Fault(
        "a resumed run draws from generators as seeded",
        TRAINER,
        "if rng is not None:",
        "if rng is not None and not self.step:",
        "tests/parity/test_kill_and_resume.py::test_a_run_stopped_repeatedly_equals_an_uninterrupted_one",
    ),
    Fault(
        "deterministic algorithms are not asked for",
        DETERMINISM,
        "use_deterministic_algorithms(deterministic)",
        "use_deterministic_algorithms(False)",
        "tests/trainer/test_determinism.py",
    ),
    Fault(
        "cuDNN searches for the fastest kernel in a deterministic run",
        DETERMINISM,
        "benchmark = not deterministic",
        "benchmark = True",
        "tests/trainer/test_determinism.py",
    ),
    # Weight decay, groups, layer decay
    Fault(
        "norms and biases are decayed",
        GROUPS,
        '["weight_decay"] if name in weights else 0.0',
        '["weight_decay"]',
        f"{OPTIM}/test_optimizer.py::test_matrices_are_decayed_norms_and_biases_are_not",
    ),
    Fault(
        "vectors are decayed",
        "trainer/optim/decay.py",
        "parameter.ndim >= 2",
        "parameter.ndim >= 1",
        f"{OPTIM}/test_optimizer.py::test_a_vector_is_not_decayed_whatever_its_name",
    ),
    Fault(
        "the last block has the rate of the head",
        "trainer/optim/blocks.py",
        "len(blocks) + 1 - level",
        "len(blocks) - level",
        f"{OPTIM}/test_groups.py::test_layer_decay_counts_blocks_from_the_head_down",
    ),
    Fault(
        "groups have no rate of their own",
        TRAINER,
        "lr * group[LR_FACTOR]",
        "lr",
        f"{OPTIM}/test_groups.py::test_the_schedule_multiplies_every_groups_rate_and_the_highest_is_logged",
    ),
    # The schedule
    Fault(
        "the warm-up begins at a rate of 0",
        SCHEDULE,
        "(step + 1) / warmup",
        "step / warmup",
        f"{OF_SCHEDULE}::test_warmup_is_linear_and_ends_at_the_peak",
    ),
    Fault(
        "the cosine is cut off at its final share",
        SCHEDULE,
        "self.final + (1 - self.final) * _half_cosine(min(1.0, step / steps))",
        "max(self.final, _half_cosine(min(1.0, step / steps)))",
        f"{OF_SCHEDULE}::test_cosine_falls_to_its_final_share",
    ),
    Fault(
        "the linear schedule reaches its end with the last step",
        SCHEDULE,
        "1.0 + (self.final - 1.0) * min(1.0, step / steps)",
        "1.0 + (self.final - 1.0) * min(1.0, step / max(1, steps - 1))",
        f"{OF_SCHEDULE}::test_linear_has_the_values_of_torchs",
    ),
    # Averaged weights
    Fault(
        "the average forgets its warm-up",
        EMA,
        "1 - self._options.decay_after(step)",
        "1 - self._options.decay",
        f"{OPTIM}/test_ema.py::test_it_is_the_average_of_the_weights_after_each_step_in_fp32",
    ),
    Fault(
        "the average is of weights rounded to 16 bits",
        EMA,
        "self._sources = live | kept",
        "self._sources = live",
        f"{OPTIM}/test_ema.py::test_it_is_the_average_of_the_weights_after_each_step_in_fp32",
    ),
    Fault(
        "the last weights are evaluated in place of their average",
        TRAINER,
        "with self.average.in_place():",
        "with torch.no_grad():",
        f"{OPTIM}/test_ema.py::test_evaluation_uses_it_and_gives_the_weights_back",
    ),
    # Mixed images and classes
    Fault(
        "labels are mixed by the neighbour's share",
        MIXING,
        "torch.lerp(_neighbours(targets), targets,",
        "torch.lerp(targets, _neighbours(targets),",
        f"{OF_MIXING}::test_mixup_blends_pixels_and_labels_of_a_pair_by_one_share",
    ),
    Fault(
        "a cut's share is the drawn one, not the box's",
        MIXING,
        "return 1 - (right - left) * (bottom - top) / size**2, (left",
        "return share, (left",
        f"{OF_MIXING}::test_the_share_of_a_cut_is_what_the_box_leaves",
    ),
    Fault(
        "balanced weights count classes without images",
        "recipes/vision/objective.py",
        "(present.sum() * counts.clamp(min=1))",
        "(len(counts) * counts.clamp(min=1))",
        f"{OF_MIXING}::test_balanced_weights_are_scikit_learns_and_reach_the_training_loss_only",
    ),
    # Checkpoints
    Fault(
        "no hash is verified",
        "trainer/checkpoint/schema.py",
        "if sha256(folder / name) != expected:",
        "if not (folder / name).exists():",
        f"{OF_CHECKPOINT}::test_damage_is_reported_with_the_newest_intact_checkpoint",
    ),
    Fault(
        "the best checkpoint is removed",
        STORE,
        "set(saved[:-keep]) - {best_step(folder)}",
        "set(saved[:-keep])",
        f"{OF_CHECKPOINT}::test_prune_keeps_the_newest_and_the_best",
    ),
    Fault(
        "the old checkpoint of a step is removed before the new one is there",
        STORE,
        "temporary.rename(target)",
        "(shutil.rmtree(target, ignore_errors=True), temporary.rename(target))",
        f"{OF_CHECKPOINT}::test_a_step_that_is_saved_already_stays_as_it_is",
    ),
    Fault(
        "a half-written checkpoint counts",
        STORE,
        'int(path.name.removeprefix("step-")) if STEP_NAME.fullmatch(path.name)',
        "int(found[0][5:]) if (found := STEP_NAME.search(path.name))",
        f"{OF_CHECKPOINT}::test_an_interrupted_save_is_invisible",
    ),
    Fault(
        "masters are not saved",
        "trainer/optim/state.py",
        "(masters.held() if masters else ())",
        "()",
        f"{OF_MASTERS}::test_resumed_is_bitwise_the_same",
    ),
    # The metric log and MLflow
    Fault(
        "the last window is not logged",
        MONITOR,
        " and record.step != self.last_step",
        "",
        f"{OF_MONITOR}::test_one_line_per_window_and_for_the_first_and_the_last_step",
    ),
    Fault(
        "a resumed run forgets the window that it was in",
        MONITOR,
        'list(state["losses"])',
        "[]",
        f"{OF_MONITOR}::test_state_continues_within_a_window",
    ),
    Fault(
        "a resumed run keeps a line after its checkpoint",
        "trainer/tracking/metric_log.py",
        '["step"] <= step',
        '["step"] <= step + 1',
        "tests/trainer/tracking/test_tracking.py::test_resuming_removes_what_came_after_the_checkpoint",
    ),
    Fault(
        "the last point is sent to MLflow again",
        "trainer/tracking/mlflow/delivery.py",
        "if point.step > self",
        "if point.step >= self",
        "tests/command_line/tracking/test_sync.py::test_after_a_failed_call_the_store_is_queried_for_what_it_has",
    ),
    Fault(
        "metrics have the step before theirs",
        "trainer/run/run.py",
        "self._log_metrics(record.step, metrics)",
        "self._log_metrics(record.step - 1, metrics)",
        "tests/parity/test_kill_and_resume.py::test_a_killed_run_continues_from_the_last_checkpoint",
    ),
    # Statistics and verdicts
    Fault(
        "an interval of few values is that of the normal distribution",
        STATISTICS,
        "stdtrit(count - 1, (1 + level) / 2)",
        "stdtrit(1e9, (1 + level) / 2)",
        f"{OF_STATISTICS}::test_the_interval_is_scipys",
    ),
    Fault(
        "the standard error divides by n",
        STATISTICS,
        "array.std(ddof=1)",
        "array.std(ddof=0)",
        f"{OF_STATISTICS}::test_the_interval_is_scipys",
    ),
    Fault(
        "several arms are not corrected for their number",
        STATISTICS,
        "alpha / left",
        "alpha",
        f"{OF_STATISTICS}::test_holms_levels",
    ),
    Fault(
        "the margin has one side",
        STATISTICS,
        "max(self._above(-margin), self._below(margin))",
        "self._below(margin)",
        f"{OF_STATISTICS}::test_the_p_values_are_scipys",
    ),
    Fault(
        "differences are not of the same seed",
        JUDGE,
        "[(loss - others[s]) / abs(others[s]) for s, loss in losses.items() if others.get(s)]",
        "[(loss - other) / abs(other) for loss, other in zip(losses.values(), others.values(), strict=False)]",
        f"{OF_JUDGE}::test_ratios_are_of_runs_of_the_same_seed",
    ),
    Fault(
        "the null arm does not measure the noise",
        JUDGE,
        "curve_distances(_finished(by_arm[null]), base) if null else {}",
        "{}",
        f"{OF_JUDGE}::test_curves_separate_where_they_are_further_apart_than_any_null_curve",
    ),
    Fault(
        "the null arm counts among the arms",
        JUDGE,
        " and not result.is_null]",
        "]",
        f"{OF_JUDGE}::test_arms_of_one_comparison_are_corrected_for_their_number_and_the_null_arm_is_none_of_them",
    ),
    # Masters, rounding, freezing, Muon
    Fault(
        "stochastic rounding is biased",
        MASTERS,
        "1 << _LOW_BITS, values.shape",
        "1 << _LOW_BITS - 1, values.shape",
        f"{OF_MASTERS}::test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be",
    ),
    Fault(
        "every step rounds by the same numbers",
        MASTERS,
        "SeedSequence((self._seed, step))",
        "SeedSequence((self._seed, 0))",
        f"{OF_MASTERS}::test_rounding_depends_on_seed_and_step",
    ),
    Fault(
        "a model with frozen weights has no masters",
        MASTERS,
        "if weight.requires_grad and weight.dtype in",
        "if all(each.requires_grad for each in model.parameters()) and weight.dtype in",
        f"{OPTIM}/test_freeze.py",
    ),
    Fault(
        "frozen batch norm follows the data",
        "trainer/optim/freeze.py",
        "norm.train = MethodType(_stay_in_evaluation, norm)",
        "norm.requires_grad_(False)",
        f"{OPTIM}/test_freeze.py::test_batch_norm_that_is_frozen_as_a_whole_stays_in_evaluation_mode",
    ),
    Fault(
        "Muon iterates once",
        "trainer/optim/muon.py",
        '"ns_steps": ns_steps}',
        '"ns_steps": 1}',
        f"{OPTIM}/test_classes.py::test_three_steps_are_those_of_the_library",
    ),
    Fault(
        "what Muon leaves is not decayed as by AdamW",
        "trainer/optim/muon.py",
        "_parts.append((False, torch.optim.AdamW(others",
        "_parts.append((False, torch.optim.Adam(others",
        f"{OPTIM}/test_classes.py::test_three_steps_are_those_of_the_library",
    ),
    # Early stopping, evaluation
    Fault(
        "early stopping waits for one evaluation more",
        "trainer/run/scores.py",
        "self._waited >= self.stopping.patience",
        "self._waited > self.stopping.patience",
        "tests/trainer/run/test_scores.py::test_early_stopping_waits_for_an_improvement_by_more_than_min_delta",
    ),
    Fault(
        "a short last batch of an evaluation weighs as much as a whole one",
        EVALUATION,
        "total += value",
        "total += value * (targets / (number + 1)) / max(1, count_targets(batch))",
        f"{DATA}::test_the_ranks_evaluate_every_sample_once_in_as_many_batches_each",
    ),
    Fault(
        "a short last batch of an evaluation is left out",
        EVALUATION,
        "range(0, len(chosen), size)]",
        "range(0, len(chosen) - size + 1, size)]",
        f"{DATA}::test_evaluation_samples_are_spread_evenly_in_order_and_never_augmented",
    ),
    Fault(
        "what fills a rank's share of an evaluation is counted",
        EVALUATION,
        "counts = number < self._own",
        "counts = number >= 0",
        f"{DATA}::test_the_ranks_evaluate_every_sample_once_in_as_many_batches_each",
    ),
    Fault(
        "perplexity is a power of two",
        "recipes/language.py",
        "math.exp(loss)}",
        "2.0**loss}",
        "tests/recipes/test_gpt2.py::test_perplexity_is_the_exponential_and_overflows_to_infinity_rather_than_failing",
    ),
    # Parallel training
    Fault(
        "DDP sums gradients at the first microbatch",
        TRAINER,
        "number == len(microbatches)",
        "number == 1",
        f"{PARALLEL}::test_gradient_loss_norm_and_score_are_those_of_one_process",
    ),
    Fault(
        "DDP averages gradients that are normalised already",
        WRAP,
        "done.value()[0])",
        "done.value()[0] / dist.get_world_size())",
        f"{PARALLEL}::test_gradient_loss_norm_and_score_are_those_of_one_process",
    ),
    Fault(
        "a rank restores another rank's rows",
        "trainer/parallel/shards.py",
        "tensor.device_mesh.get_local_rank() * chunk",
        "(tensor.device_mesh.size() - 1 - tensor.device_mesh.get_local_rank()) * chunk",
        "tests/parallel/test_training.py::test_two_processes_train_as_one_does_and_resume_exactly",
    ),
    # Models and formats
    Fault(
        "padding is attended to",
        "recipes/bert.py",
        "attention_mask=mask[:, None, None]",
        "attention_mask=torch.zeros_like(mask)[:, None, None]",
        "tests/recipes/test_bert.py::test_the_loss_is_summed_over_starts_and_ends_and_padding_does_not_matter",
    ),
    Fault(
        "fp8 scales every tensor by one number whatever is asked for",
        "trainer/precision/fp8.py",
        "from_recipe_name(scaling)",
        "from_recipe_name(SCALINGS[0])",
        "tests/trainer/precision/test_fp8.py::test_the_scaling_that_is_asked_for_reaches_torchao",
    ),
    Fault(
        "fp8 reaches into fp32 islands",
        "trainer/precision/fp8.py",
        "and id(module) not in islands",
        "and id(module)",
        "tests/trainer/precision/test_fp8.py::test_plain_linear_layers_whose_sides_divide_by_16_outside_islands",
    ),
    Fault(
        "the unit roundoff of bf16 is half of what it is",
        FORMATS,
        "torch.bfloat16, 2.0**-8,",
        "torch.bfloat16, 2.0**-9,",
        f"{OF_FORMATS}::test_range_and_rounding_are_those_of_the_dtype",
    ),
    Fault(
        "the largest number of fp16 is a power of two",
        FORMATS,
        "65504.0",
        "65536.0",
        f"{OF_FORMATS}::test_range_and_rounding_are_those_of_the_dtype",
    ),
    Fault(
        "the significand of tf32 is that of bf16",
        FORMATS,
        'Number("tf32", torch.float32, 2.0**-11,',
        'Number("tf32", torch.float32, 2.0**-8,',
        f"{OF_FORMATS}::test_tf32_has_the_exponents_of_fp32_and_the_significand_of_fp16",
    ),
    Fault(
        "cuDNN's convolutions stay in TF32",
        "trainer/precision/modes.py",
        "backend.fp32_precision = fp32",
        'backend.fp32_precision = "tf32" if backend is backends.cudnn.conv else fp32',
        "tests/trainer/precision/test_precision.py::test_fp32_products_are_ieee_in_every_backend",
    ),
)
