"""What training on says: with which cures it learns, and what fp32 from the same start shows as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mantissa
from mantissa.doctor.budget import Budget, LeftOutError
from mantissa.doctor.checks import CHECKS
from mantissa.doctor.course import NOT_TRAINED, Course
from mantissa.doctor.diagnosis import diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.explosion import explosion, losses_of
from mantissa.doctor.finding import DOMAIN, OVERFLOW, RATE, Cure
from mantissa.doctor.outliers import without_outliers
from mantissa.formats import BF16, FORMATS, plain
from mantissa.step.batch import Batch
from mantissa.step.loop import LoopStep
from mantissa.step.replay import Replay
from tests.mantissa.doctor.faults import NARROW, Computes, Net, error, regression


def of_loop(precision: str, rate: float, model: nn.Module | None = None) -> LoopStep:
    torch.manual_seed(0)
    model = model or Net([nn.Linear(NARROW, NARROW)])
    optimizer = torch.optim.SGD(model.parameters(), rate)
    return LoopStep.copied(model, error, regression(), FORMATS[precision], optimizer)


def test_what_is_finite_and_does_not_learn_is_no_cure() -> None:
    """Updates of 16-bit weights are lost at this rate; fp32 weights have them."""
    step = of_loop("bf16_pure", 1e-3)
    course = Course(step, Budget(600, step))
    assert course.learned(Cure("another scale", step.at_scale(2.0)), step) is None
    cure = course.learned(Cure("fp32 weights", step.with_fp32_weights()), step)
    assert cure is not None
    assert str(cure) == "fp32 weights"


def test_where_there_is_no_time_to_train_it_says_so() -> None:
    step = of_loop("bf16", 1e-3)
    for course in (
        Course(step, Budget(1.0, step, step_seconds=1.0)),
        Course(of_loop("bf16", 0.0), Budget(600, step)),
    ):
        if course.start is not step:
            course.start = LoopStep.copied(Net([]), error, regression(), FORMATS["bf16"])  # no optimizer
        cure = course.learned(Cure("fp32", course.start.in_format(FORMATS["fp32"])), course.start)
        assert cure is not None
        assert cure.about == NOT_TRAINED


def test_what_fp32_was_not_asked_is_left_out() -> None:
    step = of_loop("bf16", 1e-3)
    with pytest.raises(LeftOutError, match=r"^set time_budget_s=\d+, "):
        Course(step, Budget(1.0, step, step_seconds=1.0)).explosion()


def test_a_search_without_an_end_is_left_out() -> None:
    step = of_loop("bf16", 1e6)
    budget = Budget(600, step)
    course = Course(step, budget)
    assert course.count
    budget.seconds = 0.0
    assert course.explosion() is None
    assert budget.left_out[0].startswith("lower learning rates and other changes in fp32 (no time left")


def test_a_part_that_is_run_again_is_left_out_once() -> None:
    def fill() -> None:
        raise MemoryError

    budget = Budget(600, of_loop("fp32", 1e-3))
    for _ in range(2):
        assert budget.run("cures", fill) is None
    assert budget.left_out == ["cures (out of memory)"]


def test_of_rates_that_were_not_tried_nothing_is_said() -> None:
    step = of_loop("fp32", 1e6)
    batches = step.following(20)
    turns = iter([True, False])  # one rate, of those that rise
    assert explosion(step, batches, losses_of(Replay.exact(step), batches), lambda: next(turns), failed=True) is None


def test_a_cure_that_the_reference_has_shown_needs_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Budget.run

    def ends(self: Budget, part: str, make: Any, always: bool = False) -> Any:
        made = run(self, part, make, always)
        if part == "training in fp32":
            self.seconds = 0.0
        return made

    monkeypatch.setattr(Budget, "run", ends)
    taken = replace(take(of_loop("fp32", 1e4), ""), history="the loss rises")
    (finding,) = diagnose(taken, CHECKS, 600).findings
    assert "trained in float64 alone; no time was left" in finding.cure[0]


def test_a_cure_of_fp32_that_does_not_hold_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(Course, "learned", lambda course, cure, base: tried.append(cure.text))
    taken = replace(take(of_loop("fp32", 1e4), ""), history="the loss rises")
    assert diagnose(taken, ("formats",), 600).findings[0].kind == RATE
    assert len(tried) == 1


def test_a_cure_is_tried_from_the_start_and_not_from_the_weights_that_are_ruined() -> None:
    """Its scale is that of a new run, unless the cure sets it."""
    start = of_loop("fp16", 1e-2)
    ruined = start.with_values(lambda weight: weight * 1e6).at_scale(2.0)
    course = Course(start, Budget(600, start))
    changed = start.changed_as(ruined.in_format(plain(BF16)).in_fp32(["body"]), ruined)
    assert (changed.format, changed.fp32_modules, changed.scale) == (plain(BF16), ["body"], start.scale)
    assert changed.weights is start.weights
    assert start.changed_as(ruined.at_scale(8.0), ruined).scale == 8.0
    assert course.learned(Cure("bf16", ruined.in_format(plain(BF16))), ruined) is not None


def test_data_is_changed_in_every_step() -> None:
    spiked = regression()
    for batch in spiked:
        batch["y"][3] = 1e12
    step = of_loop("fp32", 1e-2)
    step = LoopStep.copied(step.model, error, spiked, FORMATS["fp32"], step.optimizer)
    usual = step.with_microbatches(map(without_outliers, step.microbatches))
    course = Course(step, Budget(600, step))
    assert course.learned(Cure("in this step alone", usual), step) is None
    assert course.learned(Cure("in all of them", usual, data=without_outliers), step) is not None


def examined(model: nn.Module, rate: float, precision: str = "fp16") -> mantissa.doctor.examine.Report:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    return mantissa.examine(model, error, regression(), precision, optimizer, time_budget_s=600, failed=True)


def large(own: nn.Module, x: Tensor) -> Tensor:
    """Above what fp16 can hold, and divided by that again."""
    product: Tensor = own.get_submodule("layer")(x) * 1e6
    return product / product.abs().max()


def test_a_rate_at_which_fp32_explodes_is_the_first_fault_and_its_cure_learns() -> None:
    """The format breaks as well, and has a cure of its own, which was tried at the lower rate."""
    torch.manual_seed(0)
    report = examined(Net([Computes(large, layer=nn.Linear(NARROW, NARROW))]), rate=1e4)
    rate, overflow = report.findings
    assert (rate.kind, overflow.kind) == (RATE, OVERFLOW), str(report)
    assert "together with the next cure" in rate.cure[0]
    assert overflow.cure


def test_a_format_is_not_blamed_for_what_a_lower_rate_cures_alone() -> None:
    torch.manual_seed(0)
    model = Net([nn.Linear(NARROW, NARROW)])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(30)
    report = examined(model, rate=1e4)
    assert [finding.kind for finding in report.findings if finding.cure] == [RATE], str(report)


def test_a_domain_fault_is_no_matter_of_the_rate() -> None:
    torch.manual_seed(0)
    model = Net([Computes(lambda own, x: own.layer(x) / (x - x), layer=nn.Linear(NARROW, NARROW))])
    assert [finding.kind for finding in examined(model, 1e4).findings] == [DOMAIN]


@pytest.mark.parametrize(("lost", "is_cure"), [(0.0, True), (0.2, False)])
def test_a_format_whose_losses_leave_the_spread_has_to_learn_as_much(
    lost: float, is_cure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding in every operator takes losses farther than that of the weights does; here by a tenth, up and down."""

    def rounded(replay: Replay, batches: list[list[Batch]]) -> Tensor:
        losses = losses_of(replay, batches)
        if replay.format is not step.format:
            return losses
        sides = torch.ones_like(losses)
        sides[1::2] = -1
        sides[0] = 0
        return losses + sides * losses / 10 + lost * (losses[0] - losses)

    monkeypatch.setattr("mantissa.doctor.course.losses_of", rounded)
    step = of_loop("bf16", 0.1)
    assert (Course(step, Budget(600, step)).learned(Cure("bf16", step), step) is not None) == is_cure


def test_where_training_rises_what_lets_it_learn_a_little_is_the_cause() -> None:
    """Of a loss that is mostly constant."""
    torch.manual_seed(0)
    model = Net([nn.Linear(NARROW, NARROW)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.999)
    step = LoopStep.copied(
        model, lambda model, batch: 3 + error(model, batch), regression(), FORMATS["fp32"], optimizer
    )
    finding = Course(step, Budget(600, step)).explosion()
    assert finding is not None
    assert finding.kind == RATE


@pytest.mark.parametrize(("peak", "kind"), [(1.0, None), (3.0, RATE)])
def test_what_shot_up_and_came_back_is_no_standard_for_a_lower_rate(peak: float, kind: str | None) -> None:
    step = of_loop("fp32", 1.0)
    batches = step.following(30)
    still = losses_of(Replay.exact(step.at_rate(0.0)), batches)
    lower = losses_of(Replay.exact(step.at_rate(0.1)), batches)
    exact = still - (still - lower) / 1.5  # learns two thirds of what the lower rate does
    exact[5] = peak * still[5]
    finding = explosion(step, batches, exact, failed=True)
    assert (finding and finding.kind) == kind
