"""``python -m mantissa checkup MODEL``: which precisions a model of transformers can be trained in."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from mantissa.commands import report_folder, say_part, seconds_of
from mantissa.display import columns, counted, quantity
from mantissa.doctor.checks import CHECKS
from mantissa.doctor.examine import PRECISIONS, Report, examine
from mantissa.errors import UsageError
from mantissa.names import format_name
from mantissa.step.batch import Batch

SEQ2SEQ, MASKED, CAUSAL, IMAGES = "Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification"
MAPPINGS = {
    SEQ2SEQ: "SEQ_TO_SEQ_CAUSAL_LM",
    MASKED: "MASKED_LM",
    CAUSAL: "CAUSAL_LM",
    "ImageTextToText": "IMAGE_TEXT_TO_TEXT",  # on text alone
    IMAGES: "IMAGE_CLASSIFICATION",
}
"""Tasks that models are trained for here: transformers' names in ``AutoModelFor…`` and ``MODEL_FOR_…_MAPPING``."""
_WANTED = "give a folder that save_pretrained wrote, with weights for torch, or a name on the Hugging Face Hub"


def load(source: str, attention: str | None = None) -> tuple[Any, str]:
    """Load a model in fp32, in training, on a GPU where there is one; return it with its task, one of ``MAPPINGS``.

    Args:
        source: a folder that ``save_pretrained`` wrote, or the name of a model on the Hugging Face Hub.
        attention: transformers' ``attn_implementation``; None: the model's default.

    Raises:
        UsageError: transformers is not installed, there is no such model, or it is for another task.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UsageError("checkup needs transformers, which is not installed; pip install transformers") from error
    source = os.path.expanduser(source)  # "~" of nobody stays; Path's raises
    path = Path(source)
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or ("/" in source and path.parent.is_dir())
    if (is_path or path.exists()) and not (path / "config.json").exists():
        what = "there is no config.json in this folder" if path.is_dir() else "there is no such folder"
        raise UsageError(f"{source}: {what}; {_WANTED}")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        mappings = {task: getattr(transformers, f"MODEL_FOR_{name}_MAPPING") for task, name in MAPPINGS.items()}
        able = {task: str(mapping[type(config)]) for task, mapping in mappings.items() if type(config) in mapping}
        named = [task for task in able for name in config.architectures or [] if f".{name}'" in able[task]]
        # Of a class for another task a part may be left out, such as an encoder; of a model without a head nothing is.
        heads = ["".join(name.partition("For")[1:]) for name in config.architectures or [""]]
        able = {task: names for task, names in able.items() if any(f"{head}'" in names for head in heads)}
        if not able:
            what = ", ".join(config.architectures or [f"a model of type {config.model_type}"])
            raise UsageError(
                f"{source}: {what} is no language model and classifies no images; load it yourself and call "
                "mantissa.examine(model, loss, batches)"
            )
        task = [*named, *able][0]
        loader = getattr(transformers, f"AutoModelFor{task}")
        model = loader.from_pretrained(
            source, config=config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    except UsageError:
        raise
    except Exception as error:  # of any kind: absent, unreachable, of unknown type, damaged
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{source} cannot be loaded: {why}; {_WANTED}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train(), task


def _tokenizer(source: str) -> Any:
    """Return the tokenizer beside a model; None: there is none, or a package that it needs is not installed."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return None
    # Transformers makes up an empty one for a folder that has none; of T5, it has the sign of a space.
    return None if set(tokenizer.get_vocab()) <= {"▁", *tokenizer.all_special_tokens} else tokenizer


def text_batches(model: Any, task: str, tokenizer: Any, text: str, shape: tuple[int, int, int]) -> list[Batch]:
    """Return batches for a language model, with padding at the end of each one's last row.

    Args:
        model: of transformers.
        task: of the model.
        tokenizer: of the model; None: the tokens are random.
        text: to cut into rows.
        shape: number of batches, rows of a batch, tokens of a row (as many again are a decoder's, where there is one).
    """
    number, rows, length = shape
    vocabulary, generator = model.get_input_embeddings().num_embeddings, torch.Generator().manual_seed(0)
    width = 2 * length if task == SEQ2SEQ else length
    count = number * rows * width
    tokens = torch.randint(vocabulary, (count,), generator=generator)
    if tokenizer is not None:
        tokens = torch.tensor(tokenizer(text[: 20 * count], add_special_tokens=False, verbose=False)["input_ids"])
        if len(tokens) < count:
            raise UsageError(f"the text has {len(tokens)} of {count} tokens; set smaller --length, --batch or --passes")
        if tokens.max() >= vocabulary:
            raise UsageError(f"the tokenizer has token {tokens.max()}, the model ends at {vocabulary - 1}; use its own")
    paddings = [getattr(owner, "pad_token_id", None) for owner in (tokenizer, model.config)]
    padding = next((token for token in paddings if token is not None and token >= 0), 0)
    present = torch.ones(rows, length, dtype=torch.long)
    present[-1, length // 2 :] = 0
    wanted = inspect.signature(model.forward).parameters
    batches = []
    for texts in tokens[:count].view(number, rows, width):
        inputs, labels = texts[:, :length].masked_fill(present == 0, padding), texts[:, -length:]
        if task == MASKED:
            hidden = torch.rand(rows, length, generator=generator) < 0.15
            hidden[:, 0] = True
            labels = labels.masked_fill(~hidden, -100)
            inputs = inputs.masked_fill(hidden & (present == 1), getattr(tokenizer, "mask_token_id", None) or 0)
        labels = labels.masked_fill(present == 0, -100)
        batch = {"input_ids": inputs, "attention_mask": present, "token_type_ids": 0 * inputs, "labels": labels}
        batches.append({name: tensor.to(model.device) for name, tensor in batch.items() if name in wanted})
    return batches


def image_batches(model: Any, number: int, rows: int) -> list[Batch]:
    """Return batches of normal noise, which normalised images resemble, with random labels."""
    generator = torch.Generator().manual_seed(0)
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", 224)
    shape = rows, vision.num_channels, *([size, size] if isinstance(size, int) else size)
    batches = []
    for _ in range(number):
        pixels = torch.randn(shape, generator=generator)
        labels = torch.randint(model.config.num_labels, (rows,), generator=generator)
        batches.append({"pixel_values": pixels.to(model.device), "labels": labels.to(model.device)})
    return batches


def table(reports: dict[str, Report]) -> str:
    """Return the verdict of each precision, where it breaks, and what cures it."""
    rows = [("precision", "verdict", "where", "fp32 islands", "their cost")]
    for precision, report in reports.items():
        islands, names, cost = report.diagnosis.islands, "-", "-"
        if islands is not None:
            more = f" and {len(islands.modules) - 1} more" if len(islands.modules) > 1 else ""
            names, cost = islands.modules[0] + more, islands.cost
        where = ", ".join(f"{finding.kind}: {finding.place}" for finding in report.findings) or "-"
        rows.append((precision, report.verdict, where, names, cost))
    return columns(rows)


def main(arguments: list[str]) -> int:
    """Check a model and print what was found; return 0 if every precision is HEALTHY, else the highest exit code."""
    parser = argparse.ArgumentParser(
        "python -m mantissa checkup", description="Try precisions on a transformers model."
    )
    parser.add_argument("model", help="a folder that save_pretrained wrote, or a name on the Hugging Face Hub")
    parser.add_argument("--precision", default="fp16,bf16", help=f"of {', '.join(PRECISIONS)} (default: fp16,bf16)")
    parser.add_argument("--text", help="file to train on (default: the documentation of Python)")
    parser.add_argument("--length", type=int, default=128, help="tokens in a row (default: 128)")
    parser.add_argument("--batch", type=int, default=4, help="rows in a batch (default: 4)")
    parser.add_argument("--passes", type=int, default=3, help="forward and backward passes (default: 3)")
    parser.add_argument("--attention", help="eager, sdpa, … (default: the model's)")
    parser.add_argument("--time-budget", default="60s", help="for each precision, such as 5min (default: 60s)")
    parser.add_argument("--report", help="folder for a page about each precision")
    options = parser.parse_args(arguments)
    time_budget_s = seconds_of("--time-budget ", options.time_budget)
    precisions = list(map(format_name, options.precision.split(",")))
    if unknown := [name for name in precisions if name not in PRECISIONS]:
        raise UsageError(f"--precision {unknown[0]} is unknown; use some of {','.join(PRECISIONS)}")
    if min(options.length - 1, options.batch, options.passes) < 1:
        raise UsageError("--length must be 2 or more, --batch and --passes 1 or more")
    if options.text and not Path(options.text).is_file():
        raise UsageError(f"--text {options.text}: there is no such file")
    model, task = load(options.model, options.attention)
    if task == IMAGES:
        batches, what = image_batches(model, options.passes, options.batch), "noise in the place of images"
    else:
        text = Path(options.text).read_text(errors="replace") if options.text else "\n".join(topics.values())
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or options.length
        shape = (options.passes, options.batch, min(options.length, longest))
        tokenizer = _tokenizer(options.model)
        batches = text_batches(model, task, tokenizer, text, shape)
        what = (
            "random tokens, as it has no tokenizer" if tokenizer is None else options.text or "Python's documentation"
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    size = " x ".join(map(str, next(iter(batches[0].values())).shape))
    size += " (the model takes no longer rows)" * (task != IMAGES and shape[2] < options.length)
    print(f"{type(model).__name__}, {quantity(count)} parameters; {counted(len(batches), 'pass')} over {size}: {what}")
    folder = report_folder(options.report) if options.report else None
    reports = {}
    for name in precisions:
        reports[name] = report = examine(
            model,
            lambda model, batch: model(**batch).loss,
            batches,
            name,
            accumulate=len(batches),  # one step of all passes, so that each of them is examined
            checks=[check for check in CHECKS if check != "divergence"],  # no steps follow
            time_budget_s=time_budget_s,
            say=say_part,
        )
        print(file=sys.stderr)
        print(f"\n{name}: {report}")
        if folder is not None:
            page = report.write(folder / name, shlex.join(["python", "-m", "mantissa", "checkup", *arguments]))
            print(f"report {page}")
    print(f"\n{table(reports)}")
    return max(report.diagnosis.exit_code for report in reports.values())
