"""The number that a program printed last after a text, in logs as programs print them."""

from __future__ import annotations

import math

import pytest

from mantissa.commands.compare import last_number
from mantissa.errors import UsageError

BEFORE = "val loss 2.25\n"
"""A number that must not pass for the last one."""
NANOGPT = "step 250: train loss 3.1002, val loss 3.2001\niter 250: loss 3.0987, time 12.31ms, mfu 3.12%"
KERAS = "50/50 ━━━━ 0s 2ms/step - accuracy: 0.9731 - loss: 0.0912 - val_accuracy: 0.9700 - val_loss: 0.1034"


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("2", 2.0),
        ("2.5", 2.5),
        ("2.5.", 2.5),
        ("2.", 2.0),
        (".5", 0.5),
        ("9.8e-06", 9.8e-06),
        ("1e-3", 1e-3),
        ("1.e5", 1e5),
        ("1E+05", 1e5),
        ("1e400", math.inf),
        ("-0.5", -0.5),
        ("+0.5", 0.5),
        ("-.5", -0.5),
        ("97.3%", 97.3),
        ("973/1000", 973.0),
        ("'2.5'", 2.5),
        *((text, math.nan) for text in ("nan", "-nan", "+nan", "NaN", "-nan(ind)", "None", "null", "n/a")),
        *((text, math.inf) for text in ("inf", "+inf", "Infinity", "INF")),
        *((text, -math.inf) for text in ("-inf", "-Infinity")),
    ],
)
@pytest.mark.parametrize("between", [" ", ": ", "=", '": '])
def test_a_number_is_read_whole(between: str, printed: str, value: float) -> None:
    for end in ("\n", "", ", lr 3e-4\n", "}"):
        text = f"{BEFORE}val loss{between}{printed}{end}"
        assert last_number("val loss", text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("before", "text", "value"),
    [
        ("val loss", "train loss 3", None),
        ("val loss", "", None),
        ("val loss", "val loss\n3 steps", None),
        ("val loss", "val loss was 3", None),
        ("val loss", "val loss 3.5\nval loss 2.25\nlr 1\n", 2.25),
        ("val  loss ", "val loss 3.5\nval   loss 2.25\n", 2.25),
        ("val loss", NANOGPT, 3.2001),
        ("loss", NANOGPT, 3.0987),
        ("step", NANOGPT, 250.0),
        ("val_loss", f"{KERAS}\nEpoch 1: val_loss did not improve from 0.1000", 0.1034),
        ("loss", KERAS, 0.0912),
        ("loss", " 1/2 - loss: 2.3100\b\b\b\b\b\b\b 2/2 - loss: 2.2500\b\b\b", 2.25),
        ("loss=", "1:  50%|██  | 1/2 [00:01, loss=2.31\r1: 100%|████| 2/2 [00:02, loss=2.25\r\n", 2.25),
        ("val_loss", '{"step": 10, "val_loss": 2.31}\n{"step": 20, "val_loss": 2.25}\n', 2.25),
        ('"val_loss":', '{"val_loss": 2.31}\n{"val_loss": null, "step": 20}\n', math.nan),
        ('"loss"', '{"loss":3,"step":5}', 3.0),
        ("loss", "{'loss': 2.5, 'grad_norm': nan}\n{'loss': '2.25'}\n{'eval_loss': 9.0}", 2.25),
        ("loss", "2026-11-28 13:44:06,123 INFO train.py:12 loss 2.25\n", 2.25),
        ("val_loss", "4: 100%|██| 1/1 [9.9it/s, train_loss_step=2.3, val_loss=2.4, train_loss=2.3]", 2.4),
        ("loss", "loss 2.25 aux_loss 0.01 val/loss: 0.5 --loss 3", 2.25),
        ("loss", "aux_loss 0.01", None),
        ("acc", "acc 0.91, banana", 0.91),
        ("acc", "acc 0.91\nacc5 0.97", 0.91),
        ("loss (", "loss (2.5)\nloss (nan)", math.nan),
        ("(loss)", "(loss) 2.5\n(loss) 2.25", 2.25),
        ("lm loss", " iteration 10/ 10 | lm loss: 6.944000E+00 | loss scale: 1.0 |", 6.944),
        ("loss", "valid | epoch 001 | loss 4.123 | nll_loss 2.9 | ppl 7.5", 4.123),
        ("eval-logloss", "[99]\ttrain-logloss:0.01234\teval-logloss:nan", math.nan),
        ("loss ->", "loss -> 2.5\nloss -> -inf", -math.inf),
        ("reward", "reward 5\nreward -12.5 +/- 3.1", -12.5),
        ("loss", "loss 2.25\nloss information: none", 2.25),
        ("Loss", "Loss 2.5\nloss 2.25", 2.5),
    ],
)
def test_logs_of_programs(before: str, text: str, value: float | None) -> None:
    assert last_number(before, text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "number",
    [
        "1,234.5",
        "12_345",
        "1\u202f234,5",
        "2,31",
        "1.234,5",
        "1'234.5",
        "1.2.3",
        "1.2k",
        "1:23",
        "1.#QNAN",
        "0x1p3",
        "1\u2007234",
        "1.5×10^-3",
    ],
)
def test_a_number_that_can_be_read_in_two_ways_is_refused_where_it_is_the_last(number: str) -> None:
    with pytest.raises(UsageError, match="print digits and a decimal point"):
        last_number("loss", f"loss: 2.5\nloss: {number}")
    assert last_number("loss", f"loss: {number}\nloss: 2.5") == 2.5
