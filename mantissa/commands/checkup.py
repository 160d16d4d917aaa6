"""Check a model of transformers before it is trained: which precisions are clean, which modules overflow, what cures.

    python -m mantissa checkup FOLDER_OR_HUB_ID --precision fp16,bf16
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.display import about, columns, quantity
from mantissa.errors import UsageError
from mantissa.examination import PRECISIONS, Report, examine
from mantissa.formats import FP16
from mantissa.tensors import numbers_in

Batch = dict[str, Tensor]

SEQ2SEQ, MASKED, CAUSAL, IMAGES = "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"
TASKS = {
    SEQ2SEQ: "AutoModelForSeq2SeqLM",
    MASKED: "AutoModelForMaskedLM",
    CAUSAL: "AutoModelForCausalLM",
    IMAGES: "AutoModelForImageClassification",
}
"""The tasks that are checked, by transformers' name of each, and the class that loads a model for it."""
_SHOWN = 8
"""Rows of the table of activations."""
_LEAST_TOKENS = 16
"""Different tokens in a text. transformers 5 makes an empty tokenizer for a folder that has none."""


@dataclass
class Peak:
    """The largest activation of one kind of module, in fp32."""

    kind: str
    """The module's name, with a star for the number of the layer."""
    module: str
    """That of the largest."""
    what: str
    """``input`` or ``output``."""
    amax: float
    in_fp16: bool = False
    """Whether autocast to fp16 holds it in fp16."""

    @property
    def headroom(self) -> float:
        """How many times larger it may become before it overflows in fp16; below 1: it does."""
        return FP16.largest / self.amax if self.amax else float("inf")


@dataclass
class Checkup:
    """What was found in a model."""

    title: str
    """The model's class and the data, in words."""
    reports: dict[str, Report]
    """By precision."""
    peaks: list[Peak]
    """The closest to overflow first."""

    @property
    def exit_code(self) -> int:
        """0: nothing was found in any precision."""
        return max(report.diagnosis.exit_code for report in self.reports.values())

    def __str__(self) -> str:
        """Return two tables: the verdicts, and the largest activations."""
        verdicts = [("precision", "verdict", "where", "fp32 islands", "cost")]
        for precision, report in self.reports.items():
            where = [f"{found.kind}: {found.place}" for found in report.findings]
            islands = report.diagnosis.islands
            cured = islands is not None and islands.cured
            wanted = "none cures it" if islands and not cured else "-"
            names = islands.modules if islands is not None and cured else [wanted]
            cost = islands.cost if islands is not None and cured else "-"
            for number in range(max(len(where), len(names), 1)):
                first = (precision, report.verdict) if number == 0 else ("", "")
                place = where[number] if number < len(where) else "" if number else "-"
                name = names[number] if number < len(names) else ""
                verdicts.append((*first, place, name, cost if number == 0 else ""))
        largest = [("largest activation of", "|x| in fp32", f"{FP16.largest:g} / |x|", "in", "autocast to fp16")]
        for peak in self.peaks[:_SHOWN]:
            held = "fp16" if peak.in_fp16 else "fp32"
            times = f"{about(peak.headroom)} x" + ("  OVERFLOWS" if peak.headroom < 1 and peak.in_fp16 else "")
            largest.append((f"{peak.kind}, {peak.what}", quantity(peak.amax), times, peak.module, held))
        return f"{self.title}\n\n{columns(verdicts)}\n\n{columns(largest)}"


def checkup(
    model: nn.Module, batches: Sequence[Batch], precisions: Sequence[str], title: str = "", budget_s: float = 60
) -> Checkup:
    """Examine the first training step of a transformers model in each precision; the others must confirm a cure.

    Args:
        model: in fp32, whose output has a ``loss``.
        batches: the model's named inputs, labels among them.
        precisions: of ``mantissa.examination.PRECISIONS``.
        title: what is examined, in words.
        budget_s: seconds for each precision.
    """
    peaks = activations(model, batches)
    reports = {name: examine(model, loss, batches, precision=name, budget_s=budget_s) for name in precisions}
    return Checkup(title or type(model).__name__, reports, peaks)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model itself computes: fp32 scalar, the mean over the labels."""
    result: Tensor = model(**batch).loss
    return result


@torch.no_grad()
def activations(model: nn.Module, batches: Sequence[Batch]) -> list[Peak]:
    """Return the largest activation of each kind of module, over all layers and batches, the largest first."""
    peaks: dict[tuple[str, str], Peak] = {}
    half: set[tuple[str, str]] = set()
    device = next(model.parameters()).device.type
    in_fp16 = False

    def note(name: str, what: str, values: Any) -> None:
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        for tensor in numbers_in(values)[:1]:  # what follows is a bias of positions, a mask or a cache
            if in_fp16:
                half.update({(name, what)} if tensor.dtype == torch.float16 else ())
            elif (amax := tensor.abs().max().item()) > peaks.get((kind, what), Peak("", "", "", -1.0)).amax:
                peaks.pop((kind, what), None)
                peaks[kind, what] = Peak(kind, name, what, amax)

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not any(module.children()):
            note(name, "input", args)
        note(name, "output", output)

    hooks = [
        module.register_forward_hook(lambda *call, name=name: after(name, *call))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.random.fork_rng():
            for batch in batches:
                model(**batch)
            in_fp16 = True
            with torch.autocast(device, torch.float16):
                model(**batches[0])
    finally:
        for hook in hooks:
            hook.remove()
    for peak in peaks.values():
        peak.in_fp16 = (peak.module, peak.what) in half
    first: dict[float, Peak] = {}
    for peak in peaks.values():  # what one module returns, another takes, and a third returns again
        first.setdefault(peak.amax, peak)
    return sorted(first.values(), key=lambda peak: -peak.amax)


def load(source: str, attention: str | None = None) -> tuple[nn.Module, str]:
    """Load a model of transformers in fp32, with the class that trains it, and return it with its task.

    Args:
        source: a folder that ``save_pretrained`` wrote, or the name of a model on the Hub.
        attention: ``eager``, ``sdpa`` or another; None: the model's default.

    Raises:
        UsageError: transformers is not installed; there is no such model; it is for another task; or it brings code of
            its own.
    """
    transformers = _transformers()
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().is_dir():
        raise UsageError(f"{source}: there is no such folder")
    source = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        task = _task(config)
        loader = getattr(transformers, TASKS[task])
        model = loader.from_pretrained(source, dtype=torch.float32, attn_implementation=attention)
    except (OSError, ValueError, ImportError) as error:  # no such model, no network, its own code, a missing package
        raise UsageError(f"{source}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train(), task


def _task(config: Any) -> str:
    """Return the task of a model: that of its architecture, or else one that the same type can be trained for."""
    from transformers.models.auto import modeling_auto

    for names in (config.architectures or [], [config.model_type]):
        for task in TASKS:
            known = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
            classes = {each for found in known.values() for each in ([found] if isinstance(found, str) else found)}
            if classes.intersection(names) or known.keys() & set(names):
                return task
    raise UsageError(
        f"a {config.model_type} model is no language model and no image classifier; load it yourself, and call "
        "mantissa.examine(model, loss, batches)"
    )


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UsageError("checkup needs transformers, which is not installed: pip install transformers") from error
    return transformers


def text_batches(
    model: Any, task: str, tokenizer: Any, text: str, steps: int, size: int, length: int
) -> tuple[list[Batch], str]:
    """Return the batches of some steps, and where they come from in words.

    The second half of each batch's last row is padding, as batches of texts of several lengths have it.

    Args:
        model: of transformers.
        task: of ``TASKS``, a language model.
        tokenizer: of the model; None: the tokens are random.
        text: to be cut into rows.
        steps: batches.
        size: rows of a batch.
        length: tokens of a row; of a sequence-to-sequence model, those of the input, and as many labels.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    shape = (steps, size, length * (1 + (task == SEQ2SEQ)))
    needed = steps * size * shape[-1]
    generator = torch.Generator().manual_seed(0)
    ids = tokenizer(text[: 20 * needed], add_special_tokens=False)["input_ids"] if tokenizer else []
    if len(set(ids)) < _LEAST_TOKENS:
        tokens, what = torch.randint(vocabulary, shape, generator=generator), "random tokens (it has no tokenizer)"
    elif len(ids) < needed:
        raise UsageError(
            f"the text has {len(ids):,} tokens, and {steps} steps of {size} x {shape[-1]} need {needed:,}: set a smaller --length, --batch or "
            "--steps, or a longer --text"
        )
    elif max(ids) >= vocabulary:
        raise UsageError(f"the tokenizer has token {max(ids)}, and the model's vocabulary ends at {vocabulary - 1}: they do not belong together")
    else:
        tokens, what = torch.tensor(ids[:needed]).view(shape), "text"
    wanted = inspect.signature(model.forward).parameters
    pads = [getattr(owner, "pad_token_id", None) for owner in (tokenizer, model.config)]
    pad = next((each for each in pads if each is not None and each >= 0), 0)  # any will do: it is masked
    batches = []
    for rows in tokens:
        inputs, labels = rows[:, :length].clone(), rows[:, -length:].clone()
        present = torch.ones_like(inputs)
        present[-1, length // 2 :] = 0
        inputs, labels = inputs.masked_fill(present == 0, pad), labels.masked_fill(present == 0, -100)
        if task == MASKED:
            hidden = (torch.rand(inputs.shape, generator=generator) < 0.15) & (present == 1)
            hidden[:, 0] = True
            labels = labels.masked_fill(~hidden, -100)
            mask = getattr(tokenizer, "mask_token_id", None)
            inputs = inputs.masked_fill(hidden, mask if mask is not None else vocabulary - 1)
        batch = {"input_ids": inputs, "attention_mask": present, "token_type_ids": torch.zeros_like(inputs)}
        kept = {name: tensor.to(model.device) for name, tensor in batch.items() if name in wanted}
        batches.append(kept | {"labels": labels.to(model.device)})
    return batches, what


def image_batches(model: Any, steps: int, size: int) -> list[Batch]:
    """Return batches of normal noise, as images are after they were normalised, with random labels."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    shape = (size, config.num_channels, side, side)
    return [
        {
            "pixel_values": torch.randn(shape, generator=generator).to(model.device),
            "labels": torch.randint(config.num_labels, (size,), generator=generator).to(model.device),
        }
        for _ in range(steps)
    ]


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit code: 0 nothing was found, 7 something was."""
    parser = argparse.ArgumentParser(prog="python -m mantissa checkup", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a folder that save_pretrained wrote, or the name of a model on the Hub")
    parser.add_argument("--precision", default="fp16,bf16", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--text", help="a file to train on; default: documentation of Python")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=4, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=3, help="steps: the first is examined, a cure must hold in all")
    parser.add_argument("--attention", help="attn_implementation, such as eager or sdpa")
    parser.add_argument("--budget-s", type=float, default=60, help="seconds for each precision")
    parser.add_argument("--report", help="a folder for the whole reports")
    options = parser.parse_args(arguments)
    precisions = options.precision.split(",")
    for name in precisions:
        if name not in PRECISIONS:
            raise UsageError(f"--precision {name}: there is no such precision; choose from {', '.join(PRECISIONS)}")
    if options.text and not Path(options.text).is_file():
        raise UsageError(f"--text {options.text}: there is no such file")
    model, task = load(options.model, options.attention)
    if task == IMAGES:
        batches, what = image_batches(model, options.steps, options.batch), "noise in the place of images"
    else:
        text = Path(options.text).read_text(errors="replace") if options.text else "\n".join(topics.values())
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or options.length
        length = min(options.length, longest)
        tokenizer = _tokenizer(options.model)
        batches, what = text_batches(model, task, tokenizer, text, options.steps, options.batch, length)
    count = sum(parameter.numel() for parameter in model.parameters())
    rows = " x ".join(map(str, next(iter(batches[0].values())).shape))
    title = f"{type(model).__name__}, {quantity(count)} parameters, {len(batches)} batches of {rows}: {what}"
    result = checkup(model, batches, precisions, title, options.budget_s)
    for name, report in result.reports.items():
        print(f"{name}\n{report}\n")
        if options.report:
            report.write(Path(options.report) / name)
    print(result)
    return result.exit_code


def _tokenizer(source: str) -> Any:
    """Return the tokenizer beside a model; None: there is none, or a package that it needs is not installed."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError):
        return None
