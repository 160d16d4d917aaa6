"""The command line of scripts/train.py: Hydra's, with errors told in one sentence and an exit code for each kind."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer import config
from trainer.errors import Interrupted, RunError, UserError
from trainer.run import train
from trainer.suggest import nearest

CONF = Path(__file__).resolve().parents[1] / "conf"


def main() -> int:
    """Run ``sys.argv`` and return the exit code: 0, 2 for a mistake, 3 for non-finite training, 128 + signal."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, where it would print and exit with 1
    config.register()
    codes: list[int] = []

    interrupted = False

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def task(composed: DictConfig) -> None:
        # Errors stop here: Hydra would print lines of its own. In a sweep the other runs go on after a failed
        # one, but a signal means all of them.
        nonlocal interrupted
        if interrupted:
            return
        try:
            train(config.build(composed), list(HydraConfig.get().overrides.task))
            codes.append(0)
        except RunError as error:
            codes.append(_report(error))
            interrupted = isinstance(error, Interrupted)
        except KeyboardInterrupt:
            codes.append(_report(Interrupted("interrupted before training began; nothing to save", 2)))
            interrupted = True
        except torch.OutOfMemoryError as error:
            codes.append(_report(RunError(f"out of memory: {str(error).splitlines()[0]}")))

    try:
        task()
    except (HydraException, OmegaConfBaseException) as error:
        return _report(UserError(explain(error)))
    return max(codes, default=0)


def _report(error: RunError) -> int:
    print(f"error: {error}" if not isinstance(error, Interrupted) else str(error), file=sys.stderr, flush=True)
    return error.exit_code


def explain(error: BaseException) -> str:
    """Turn an error of Hydra or OmegaConf into one sentence that names the key and what to type instead."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(str(link) for link in chain)

    if found := re.search(r"Could not find '([^']+?)/([^'/]+)'", text):
        group, typed = found[1].removeprefix("conf/"), found[2]
        choices = _choices(group)
        return f"{group}={typed} is not a choice{nearest(typed, choices)} ({', '.join(choices)})"
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is not in struct|not in '\w+')", text):
        full = re.search(r"full_key: (\S+)", text)
        key = full[1] if full else found[1] or found[2]
        return f"{key} is not a key of the config{nearest(key, _keys())}; --cfg job shows all of them"
    if found := re.search(r"Error parsing override '(.*)'", text):
        return f"{found[1]!r} is not an override; write key=value, such as steps=100 or precision=bf16"
    if found := re.search(r"(Value .*|Cannot convert .*|Incompatible value .*|Invalid .*|Unsupported .*)", text):
        key = re.search(r"full_key: (\S+)", text)
        return f"{key[1]}: {found[1]}" if key else found[1]
    return " ".join(text.split("\n")[0].split())


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _keys() -> list[str]:
    names = [entry.name for entry in dataclasses.fields(config.Config)]
    for group, classes in config.groups().items():
        names += [f"{group}.{entry.name}" for cls in classes.values() for entry in dataclasses.fields(cls)]
    return list(dict.fromkeys(names))
