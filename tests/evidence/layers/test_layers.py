"""Which layers need more bits: groups and their share of the multiplications, what is tried, and what is confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.layers import PLANTED, found, searched
from evidence.layers import groups
from evidence.layers.command import asked
from evidence.layers.groups import Group, Layers, override
from evidence.layers.search import (
    CONFIRMED,
    LIFTED,
    NEEDED,
    Ranked,
    Tried,
    best,
    difference,
    holds,
    promising,
)
from evidence.layers.training import InProcess
from mantissa.verdict.equal_loss import Reach
from mantissa.verdict.judge import Quality, Row
from mantissa.verdict.runs import Run
from tests.helpers import trainer_of
from trainer.errors import UserError
from trainer.precision import scaled
from trainer.recipe import Decision

STACK = ("recipe=bignet", "recipe.layers=8", "recipe.width=16", "batch_size=4", "data.samples=64")
GPT2 = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "batch_size=2")


def layers_of(*overrides: str, high: str = "bf16") -> Layers:
    low = trainer_of(*overrides, "precision=nvfp4")
    of_high = [text for text in overrides if not text.startswith("precision.gradients=")]
    return groups.layers_of(low, trainer_of(*of_high, f"precision={high}"))


def named(layers: Layers) -> dict[str, Group]:
    return {group.label: group for group in layers.groups()}


# --- groups, and the share of the multiplications


def test_shares_are_those_of_a_count_by_hand() -> None:
    """Three matmuls of a size in each layer, and two in the first, whose inputs need no gradient."""
    layers = layers_of(*STACK)
    assert layers.share() == 1
    found = named(layers)
    assert layers.share(found["0*"]) == pytest.approx(12 / 23)
    assert layers.share(found["*.2"]) == pytest.approx(17 / 23)
    width, context, vocabulary, blocks = 128, 16, 64, 4
    of_block = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}
    # The head, and of each block two matmuls of attention, in which each token meets all others.
    rest = width * vocabulary + blocks * 2 * width * context
    layers = layers_of(*GPT2)
    found = named(layers)
    assert list(found) == ["h.0", "h.1", "h.2", "h.3", *of_block]
    total = blocks * 12 * width**2 + rest
    for label, group in found.items():
        lifted = 12 if label not in of_block else blocks * of_block[label]
        assert layers.share(group) == pytest.approx((blocks * 12 - lifted) * width**2 / total), label


def test_gradients_in_bf16_leave_a_third_of_a_layer_in_the_format() -> None:
    whole, forward = layers_of(*GPT2).share(), layers_of(*GPT2, "precision.gradients=bf16").share()
    assert forward == pytest.approx((whole or 0) / 3)


def test_what_the_user_has_chosen_stays_and_still_counts() -> None:
    own = "precision.modules={h.1.mlp:nvfp4,*.h.2:bf16}"
    layers = layers_of(*GPT2, own)
    assert not any(".h.2." in layer or ".h.1.mlp" in layer for layer in layers.flops)
    # Of 48 units of width², block 2 is in bf16, and 8 of block 1 stay in the format; the rest is that of the model.
    whole = layers_of(*GPT2)
    assert layers.fixed / layers.total == pytest.approx(8 / 48 * (whole.share() or 0))
    assert layers.share() == pytest.approx(36 / 48 * (whole.share() or 0))
    # The pattern of a block has all of it, and what the user has typed decides behind it.
    (typed,) = override(named(layers)["h.1"], {"h.1.mlp": "nvfp4", "*.h.2": "bf16"})
    left = scaled.converted(trainer_of(*GPT2, "precision=nvfp4", typed).model)
    assert {layer.rpartition("h.")[2] for layer in left if "h.1" in layer} == {"1.mlp.c_fc", "1.mlp.c_proj"}


@pytest.mark.parametrize("recipe", [GPT2, STACK], ids=["gpt2", "bignet"])
def test_what_is_typed_lifts_the_group_and_nothing_else(recipe: tuple[str, ...]) -> None:
    layers = layers_of(*recipe)
    sets = layers.groups()
    sets += [sets[0] | sets[-1], *filter(None, [layers.group(sets[0].layers & sets[-1].layers)])]
    for group in sets:
        model = trainer_of(*recipe, "precision=nvfp4", *override(group, {})).model
        assert set(scaled.converted(model)) == {*layers.flops} - group.layers, group.label


def test_many_blocks_are_lifted_together_and_a_model_without_blocks_layer_by_layer() -> None:
    names = [f"h.{number}.{kind}" for number in range(20) for kind in ("up", "down")]
    blocks = [f"h.{number}" for number in range(20)]
    layers = Layers(["h", *blocks, *names], blocks, dict.fromkeys(names, 1), 0, 40)
    found = layers.groups()
    assert [len(group.layers) for group in found] == [6, 6, 6, 6, 6, 6, 4, 20, 20]
    assert found[1].patterns == ("h.3", "h.4", "h.5")
    alone = Layers(["a", "b"], [], {"a": 1, "b": 1}, 0, 3)
    assert [group.patterns for group in alone.groups()] == [("a",), ("b",)]
    assert Layers(["a"], [], {"a": 1}, 0, 3).groups() == []
    assert Layers(["a"], [], {"a": 1}, 0, 3, frozenset({"custom"})).share() is None


# --- what is tried, and what is confirmed

NAMES = [f"h.{number}.{kind}" for number in range(4) for kind in ("up", "down")]
MODEL = Layers(
    ["h", *(f"h.{number}" for number in range(4)), *NAMES],
    [f"h.{number}" for number in range(4)],
    {name: 4 if name.endswith("up") else 1 for name in NAMES},
    0,
    100,
)


@pytest.mark.parametrize(
    ("order", "tried"),
    [
        (("h.2", "up", "h.0"), ["h.2", "h.2.up", "up", "h.2 + up"]),
        (("up", "h.1", "h.2"), ["up", "h.1.up", "h.1", "up + h.1"]),
        (("h.1", "h.3", "h.2"), ["h.1", "h.3", "h.1 + h.3"]),
        (("up", "down"), ["up", "down"]),
        (("h.0",), ["h.0"]),
    ],
)
def test_the_best_groups_and_their_combinations_are_tried(order: list[str], tried: list[str]) -> None:
    found = named(MODEL)
    assert [group.label for group in promising([Ranked(found[label], [0.1]) for label in order], MODEL)] == tried


def test_the_smallest_set_that_is_enough_wins_else_the_one_that_gains_most() -> None:
    found = named(MODEL)

    def winner(**above: tuple[float, float]) -> str | None:
        tried = [Tried(found[label.replace("_", ".")], high, low) for label, (high, low) in above.items()]
        won = best(tried, 0.01, MODEL)
        return won and won.group.label

    assert winner(up=(0.004, -0.03), down=(0.005, -0.02), h_1=(0.02, -0.01)) == "down"
    assert winner(up=(0.006, -0.03), down=(0.008, -0.02)) == "up"
    assert winner(up=(0.001, 0.0), down=(0.02, 0.01)) is None  # as good as bf16, which nothing lifted is, too
    assert winner() is None


def test_a_run_that_diverged_counts_as_a_difference_of_one() -> None:
    good, bad = Run("a", 0, {"loss": 2.0}), Run("a", 0, {"loss": None}, failure="step 3")
    assert (difference(bad, good), difference(good, bad), difference(bad, bad)) == (1, -1, 0)
    assert difference(Run("a", 0, {"loss": 2.1}), good) == pytest.approx(0.05)
    assert difference(Run("a", 0, {"loss": 9.0}), good) == 1


def test_fresh_seeds_confirm_what_is_better_or_as_good_as_bf16_where_nothing_lifted_is_not() -> None:
    def row(verdict: str) -> Row:
        return Row(Quality(verdict=verdict), {}, Reach())

    def confirmed(low: str, lifted: str, gain: str) -> bool:
        return holds({"nvfp4": row(low), LIFTED: row(lifted)}, row(gain), "nvfp4")

    assert confirmed("WORSE", "WORSE", "BETTER")
    assert confirmed("WORSE", "EQUIVALENT", "EQUIVALENT")
    assert confirmed("WORSE", "BETTER", "INCONCLUSIVE")
    assert not confirmed("INCONCLUSIVE", "EQUIVALENT", "INCONCLUSIVE")
    assert not confirmed("WORSE", "INCONCLUSIVE", "INCONCLUSIVE")
    assert not confirmed("EQUIVALENT", "EQUIVALENT", "EQUIVALENT")


# --- whole searches

FAST = (
    "recipe.depth=2",
    "steps=40",
    "batch_size=32",
    "micro_batch_size=32",
    "eval_every=40",
    "eval_samples=512",
    "optimizer.lr=3e-3",
    "tracking=local",
)


def test_a_planted_delicate_layer_is_found_and_the_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands_in_this_process: None
) -> None:
    result = searched(2, 0, tmp_path, *FAST)
    assert found(result, 2)
    assert result.lifted is not None
    assert result.lifted.patterns == ("h.1.up",)
    assert result.ranked[0].group.label in ("h.1", "up")
    # All of it is kept: nothing trains again, and the answer is the same.
    monkeypatch.setattr(InProcess, "run", None)
    again = searched(2, 0, tmp_path, *FAST)
    assert [again.to_dict()[key] for key in ("ranked", "tried", "override")] == [
        result.to_dict()[key] for key in ("ranked", "tried", "override")
    ]
    with pytest.raises(UserError, match=r"another comparison, with another margin .* give this one a name="):
        searched(2, 0, tmp_path, *FAST, margin="margin=11%")


def test_nothing_is_lifted_where_nothing_is_delicate(tmp_path: Path, commands_in_this_process: None) -> None:
    result = searched(0, 0, tmp_path, *FAST)
    assert result.lifted is None


def test_where_the_default_does_not_fit_all_runs_have_the_same_smaller_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evidence.memory.fits.fit", lambda settled, auto: Decision("micro_batch_size", 2, ""))
    question = asked([f"recipe_path={PLANTED}", "recipe=delicate", "precision=nvfp4", f"output_dir={tmp_path}"])
    assert "micro_batch_size=2" in question.common
    assert question.base.micro_batch_size == 2


def test_the_comparisons_are_compares_own_on_other_seeds(tmp_path: Path) -> None:
    question = asked([f"recipe_path={PLANTED}", "recipe=delicate", "precision=nvfp4", f"output_dir={tmp_path}"])
    assert question.runner.__name__ == "Runner"
    assert not {*question.seeds} & {*question.fresh_seeds}
    assert NEEDED != CONFIRMED
