"""The command line of scripts/layers.py."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path

from evidence.comparison.command import margin_of, seeds_of
from evidence.comparison.report import write_report
from evidence.layers.groups import Layers, layers_of
from evidence.layers.report import report
from evidence.layers.search import Question, Search
from evidence.memory.fits import fitting
from evidence.runs import STORE_FILE, Runner, code_digest, merge_overrides, redacted_arguments
from mantissa.errors import UsageError
from mantissa.formats import FORMATS
from mantissa.verdict.runs import Store
from mantissa.verdict.statistics import PAIRS
from trainer.config.compose import check_single, compose, key_of
from trainer.config.options import ONE_PROCESS, Overriding, parse
from trainer.config.settle import plan_of
from trainer.errors import UserError, check_folder_name
from trainer.files import check_output_dir, in_use, write_json
from trainer.hardware import detect
from trainer.run.fit import release_memory
from trainer.run.provenance import versions
from trainer.trainer import Trainer

ANSWER = "layers.json"
FEWEST_STEPS = 40
"""Steps of a whole run, at least: a quarter of fewer ranks nothing."""
OF_LOW = ("precision", "precision.mode", "precision.modules", "precision.fp8_scaling", "precision.gradients")
"""Keys of the mode that is searched, which the arm in bf16 has not."""


@dataclass
class LayerOptions(Overriding):
    """Options of scripts/layers.py."""

    fixed = (
        ONE_PROCESS
        | dict.fromkeys(("seed", "run_name", "resume"), "set for every run; use seeds=4, and name=…")
        | dict.fromkeys(("precision.then", "precision.until"), "every run keeps its formats")
        | dict.fromkeys(("early_stopping", "debug"), "every run takes all its steps")
    )

    seeds: str = "4"
    margin: str = "0.3%"
    name: str = ""
    output_dir: Path = Path("outputs")

    def __post_init__(self) -> None:
        check_folder_name("name", self.name)


def main(arguments: list[str]) -> int:
    """Find the layers that need more bits, and print what to set.

    Raises:
        UserError: a mistake in the options.
        RunError: bf16 does not train.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    question = asked(arguments)
    search(question)
    return 0


def asked(arguments: list[str], runner: type[Runner] = Runner) -> Question:
    """Read the command line; what is not an option of the search is an override of all runs.

    Raises:
        UserError: it cannot work.
    """
    options, overrides = parse(arguments, LayerOptions, "overrides")
    seeds, margin = seeds_of(options.seeds), margin_of(options.margin)
    if len(seeds) < PAIRS:
        raise UserError(f"seeds={options.seeds}: a verdict needs {PAIRS} seeds or more", f"seeds={PAIRS}")
    check_single(overrides, "layers.py searches the layers of one setting; set one value")
    composed = compose(overrides)
    check_output_dir(str(options.output_dir))
    hardware = detect(composed.device)
    base = plan_of(composed, hardware).config

    # The mode has to be one whose layers can be lifted, and a run long enough to be shortened.
    mode = base.precision.mode
    if not base.precision.format.number.scaled:
        modes = ", ".join(name for name, row in FORMATS.items() if row.number.scaled)
        raise UserError(
            f"precision={mode} has no layers that need more bits: name the format that is to be used ({modes})",
            "precision=nvfp4",
            mistake="precision= precision.mode=",
        )
    if int(base.steps) < FEWEST_STEPS:
        raise UserError(
            f"steps={base.steps}: a quarter of them ranks the layers, which says nothing of fewer than {FEWEST_STEPS} "
            "in all",
            f"steps={FEWEST_STEPS}",
            mistake="epochs=",
        )
    # One microbatch for all runs, those in this process, too.
    overrides, changed = fitting(composed, overrides, hardware, base.open_datasets())
    for line in changed:
        print(line)
    question = Question(
        common=[text for text in overrides if key_of(text) not in OF_LOW],
        of_low=[text for text in overrides if key_of(text) in OF_LOW and key_of(text) != "precision.modules"],
        own=base.precision.modules,
        base=plan_of(compose(overrides), hardware).config,
        seeds=seeds,
        margin=margin,
        folder=options.output_dir.absolute() / "layers" / (options.name or f"{base.recipe.name}-{mode}"),
        command=shlex.join(["python", "scripts/layers.py", *redacted_arguments(arguments)]),
        runner=runner,
    )
    for arm in (question.high, question.short(question.arm(mode))):  # mistakes before any work
        plan_of(compose(merge_overrides(question.common, arm.overrides)), hardware)
    return question


def search(question: Question) -> Search:
    """Search, print the answer, and write it beside what is kept; the same call continues what was interrupted.

    Raises:
        UserError: there are no such layers, or the folder holds another search, or is in use.
        RunError: see ``Search.run``.
    """
    folder = question.folder
    folder.mkdir(parents=True, exist_ok=True)
    with in_use(folder):
        store = Store(folder / STORE_FILE)
        facts = {"torch": versions()["torch"], "code": code_digest(question.base.recipe_path)}
        try:
            store.begin(
                {
                    "common": redacted_arguments(question.common),
                    "precision": redacted_arguments([*question.of_low, *map(str, question.own.items())]),
                    "seeds": question.seeds,
                    "margin": question.margin,
                    **facts,
                },
                question.seeds,
                "give this one a name=…",
            )
        except UsageError as error:
            raise UserError(str(error)) from None
        found = Search(question, layers_in(question), store)
        found.run()
        answer = report(found)
        for result in filter(None, (found.needed, found.confirmed)):
            write_report(result)
        write_json(folder / ANSWER, found.to_dict())
        print(f"\n{answer.text()}\n\n{answer.write(folder)}\n{folder / ANSWER}")
    return found


def layers_in(question: Question) -> Layers:
    """Return the scaled layers of the model.

    Raises:
        UserError: it has none, or a single one.
    """
    try:
        low, high = (
            Trainer.from_config(compose(merge_overrides(question.common, arm.overrides)))
            for arm in (question.arm(question.low), question.high)
        )
    except UserError as error:  # bf16 is what the format is compared with, and no remedy
        remedies = [each for each in error.remedies if not each.startswith("precision=")]
        raise UserError(error.problem, *remedies, mistake=error.mistake) from error
    layers = layers_of(low, high)
    low.close()
    high.close()
    release_memory()
    if not layers.flops:
        raise UserError(
            f"no linear layer of recipe={question.base.recipe.name} multiplies in {question.low}, so there is none to "
            "keep in bf16"
        )
    if not layers.groups():
        raise UserError(
            f"{', '.join(layers.flops)} is all that multiplies in {question.low}, so there is nothing between it and "
            f"bf16: compare the two with scripts/compare.py arms=bf16,{question.low}"
        )
    return layers
