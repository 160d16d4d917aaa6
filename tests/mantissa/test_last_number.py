"""The number that a program printed last, in logs as programs print them."""

from __future__ import annotations

import math

import pytest

from mantissa.commands.compare import last_number
from mantissa.errors import UsageError

LOSS = "val loss ([0-9.]+)"
BEFORE = "val loss 2.25\n"
"""A number that must not pass for the last one."""
NANOGPT = "step 250: train loss 3.1002, val loss 3.2001\niter 250: loss 3.0987, time 12.31ms, mfu 3.12%"
KERAS = "50/50 ━━━━ 0s 2ms/step - accuracy: 0.9731 - loss: 0.0912 - val_accuracy: 0.9700 - val_loss: 0.1034"
FASTAI = "epoch  train_loss  valid_loss  accuracy  time    \n0      2.312345    2.412345    0.973100  00:12   \n"
FASTAI_METRIC = r"^\d+\s+[0-9.]+\s+([0-9.]+)"
LIGHTNING = "│        test_acc           │    0.9700000286102295     │\n│        test_loss          │"


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("2.5", 2.5),
        ("2.5.", 2.5),
        ("9.8e-06", 9.8e-06),
        ("1e-3", 1e-3),
        ("1.e5", 1e5),
        ("1E+05", 1e5),
        ("2.5e−3", 2.5e-3),
        ("-0.5", -0.5),
        ("+0.5", 0.5),
        ("−0.5", -0.5),
        ("-.5", -0.5),
        ("97.3%", 97.3),
        ("12.3s", 12.3),
        ("973/1000", 973.0),
        ("tensor(2.5)", 2.5),
        ("tensor(-2.5, device='cuda:0', grad_fn=<NllLossBackward0>)", -2.5),
        ("np.float64(0.51)", 0.51),
        ("Array(0.51, dtype=float32)", 0.51),
        ("tensor([0.51])", 0.51),
        *(
            (text, math.nan)
            for text in ("nan", "-nan", "+nan", "NaN", "-nan(ind)", "1.#QNAN", "-1.#IND00", "None", "∞")
        ),
        ("tensor(nan, device='cuda:0')", math.nan),
        *((text, math.inf) for text in ("inf", "+inf", "Infinity", "INF")),
        *((text, -math.inf) for text in ("-inf", "-Infinity", "−inf")),
    ],
)
@pytest.mark.parametrize("metric", [LOSS, r"val loss (\d+\.\d+)", r"val loss (?P<loss>\d\.\d{2,4})", r"val loss (\S+)"])
def test_whatever_the_expression_accepts_the_last_number_is_read_whole(metric: str, printed: str, value: float) -> None:
    for text in (f"{BEFORE}val loss {printed}\n", f"{BEFORE}val loss {printed}"):
        assert last_number(metric, text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "text", "value"),
    [
        (LOSS, "train loss 3", None),
        (LOSS, "", None),
        (LOSS, "val loss 3.5\nval loss 2.25\nlr 1\n", 2.25),
        (LOSS, NANOGPT, 3.2001),
        ("loss ([0-9.]+)", NANOGPT, 3.0987),
        ("val_loss: ([0-9.]+)", f"{KERAS}\nEpoch 1: val_loss did not improve from 0.1000", 0.1034),
        ("loss: ([0-9.]+)", KERAS, 0.0912),
        ("loss: ([0-9.]+)", " 1/2 - loss: 2.3100\b\b\b\b\b\b\b 2/2 - loss: 2.2500\b\b\b", 2.25),
        ("loss=([0-9.]+)$", "1:  50%|██  | 1/2 [00:01, loss=2.31\r1: 100%|████| 2/2 [00:02, loss=2.25\r\n", 2.25),
        ("val_loss ([0-9.]+)", "val_loss 2.5\n\x1b[1mval_loss\x1b[0m \x1b[31m2.25\x1b[0m\x1b[K", 2.25),
        ('"val_loss": ([0-9.]+)', '{"step": 10, "val_loss": 2.31}\n{"step": 20, "val_loss": 2.25}\n', 2.25),
        ('"val_loss": ([0-9.]+)', '{"val_loss": 2.31}\n{"val_loss": null, "step": 20}\n', math.nan),
        ('"val_loss": ([0-9.]+)', '{"val_loss": 2.31}\n{"val_loss": NaN, "step": 20}\n', math.nan),
        ('"loss":([0-9.]+)', '{"loss":3,"step":5}', 3.0),
        ("'eval_loss': ([0-9.]+)", "{'eval_loss': 2.25, 'runtime': 1.2}\n{'train_loss': 2.4}", 2.25),
        ("'loss': ([0-9.]+)", "{'loss': 2.5, 'grad_norm': nan}\n{'loss': '2.25'}\n{'eval_loss': 9.0}", 2.25),
        ("loss ([0-9.]+)", "2026-11-28 13:44:06,123 INFO train.py:12 loss 2.25\n", 2.25),
        ("loss: (.*)", "[2026-11-28 13:44:06] loss: 2.25\n", 2.25),
        ("val_loss=([0-9.]+)", "4: 100%|██| 1/1 [9.9it/s, train_loss_step=2.3, val_loss=2.4, train_loss=2.3]", 2.4),
        (r"test_loss\s+│\s+([0-9.]+)", f"{LIGHTNING}     2.314512014389038     │", 2.314512014389038),
        (r"test_loss\s+│\s+([0-9.]+)", f"{LIGHTNING}            nan            │", math.nan),
        (FASTAI_METRIC, FASTAI, 2.412345),
        (FASTAI_METRIC, f"{FASTAI}1      nan         nan         0.098000  00:12   \n", math.nan),
        (FASTAI_METRIC, f"{FASTAI}1      #na#        2.3         0.973100  00:12   \n", 2.3),
        ("loss ([0-9.]+)", "loss 2.25 aux_loss 0.01", 2.25),
        ("loss[:=] ?([0-9.]+)", "loss: 2.25 val/loss: 0.5", 2.25),
        ("loss ([0-9.]+)", "val_loss 2.25 aux_loss 0.01", 0.01),
        ("acc [0-9.]+", "acc 0.91, banana", 0.91),
        ("acc [0-9.]+", "acc 0.91\nacc nan", math.nan),
        ("top5 acc [0-9.]+", "top5 acc 0.97", 0.97),
        ("^loss ([0-9.]+)$", "loss 1\r\nloss nan\r\n", math.nan),
        ("val ([0-9.]+)|test ([0-9.]+)", "3 val 2.5\n3 test 2.25", 2.25),
        ("val ([0-9.]+)|test ([0-9.]+)", "3 val 2.5\n3 test nan", math.nan),
        (r"(?:val|test) loss (?:is )?([\d.]+)", "val loss 2.5\ntest loss is -inf", -math.inf),
        (r"loss [(\[]([0-9.]+)[)\]]", "loss (2.5)\nloss [nan]", math.nan),
        ("loss[^0-9]*([0-9.]+)", "loss: 2.25\nloss: nan\ntime 3s", math.nan),
        (r"loss\D+([\d.]+)", "loss: 2.25\nloss = -0.5\ntime 3s", -0.5),
        (".*loss ([0-9.]+)", "loss 2.3 loss nan", math.nan),
        ("loss: -?([0-9.]+)", "loss: 2.5\nloss: -2.5", -2.5),
        (r"loss: ([+-]\d+\.\d+)", "loss: +2.5\nloss: -2.25", -2.25),
        (r"loss: (-?\d+(\.\d+)?)", "loss: 2.5\nloss: 1e400", math.inf),
        ("lm loss: ([0-9.]+)", " iteration 10/ 10 | lm loss: 6.944000E+00 | loss scale: 1.0 |", 6.944),
        ("loss ([0-9.]+)", "valid | epoch 001 | loss 4.123 | nll_loss 2.9 | ppl 7.5", 4.123),
        ("eval-logloss:([0-9.]+)", "[99]\ttrain-logloss:0.01234\teval-logloss:nan", math.nan),
        ("loss -> ([0-9.]+)", "loss -> 2.5\nloss -> -inf", -math.inf),
        ("reward ([0-9.]+)", "reward 5\nreward -12.5 +/- 3.1", -12.5),
        ("'acc': ([0-9.]+)", "{'acc': 0.5}\n{'acc': None}", math.nan),
        ("None: ([0-9.]+)", "None: 2.25", 2.25),
        ("loss ([0-9.]+)", "info: loss 2.25\ninf done", 2.25),
        (LOSS, "[rank0]: val loss 2.5\n[rank3]: val loss 2.75\n[rank1]: val loss 2.25", 2.5),
        (LOSS, "[default1]:\x1b[32mval loss 2.75\n[default0]:val loss nan\n[default12]:val loss 2.25\n", math.nan),
        (LOSS, "[default0]:starting\n[default7]:val loss 2.75\n[default7]:val loss 2.5", 2.5),  # Megatron's last rank
        ("([0-9.]+),[0-9]+$", "2.25,100", 2.25),
        ("^([0-9.]+)", "2.25,100", 2.25),
        ("([0-9]+),[0-9]+$", "12,100", 12.0),
    ],
)
def test_logs_of_programs(metric: str, text: str, value: float | None) -> None:
    assert last_number(metric, text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "text", "said"),
    [
        ("loss: (.*)", "loss: high", r"put \(…\) around the number alone"),
        (r"loss=(\S+)", "loss=2.5\nloss=high", r"put \(…\) around the number alone"),
        ("loss", "loss 2.5", r"put \(…\) around the number alone"),
        ("loss: -([0-9.]+)", "loss: -2.5", r"the number's sign before its \(…\)"),
        *(
            (metric, f"loss: {number}", "with separators")
            for metric in ("loss: (.*)", "loss: ([0-9.]+)")
            for number in (
                "1,234.5",
                "12_345",
                "1 234",
                "1\u202f234,5",
                "2,31",
                "1.234,5",
                "1'234.5",
                "1.2.3",
                "1.2k",
                "1:23",
            )
        ),
    ],
)
def test_what_is_no_number_or_can_be_read_in_two_ways_is_refused(metric: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        last_number(metric, text)
