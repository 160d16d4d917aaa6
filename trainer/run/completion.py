"""Tab completion in bash and zsh: Hydra answers what may follow, and this says how a shell asks."""

from __future__ import annotations

import ast
import io
import os
import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

from trainer.config import outside
from trainer.config.options import Overriding, without_effect
from trainer.config.registration import by_key
from trainer.errors import UserError

# Hydra's own would run any Python file to ask it. train.py answers for the other scripts, too.
INSTALL = r"""_mantissa_completion() {
    words=($COMP_LINE)
    train=${words[1]%/*}/train.py
    if [ "${words[0]}" = python ] && grep -qs trainer.run.command "$train"; then
        choices=$(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT python "$train" -sc query=bash 2> /dev/null)
        COMPREPLY=($(compgen -W "$choices" -- "${words[$COMP_CWORD]}"))
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _mantissa_completion python"""


@contextmanager
def offering(arguments: Sequence[str]) -> Iterator[None]:
    """Where Hydra prints what may follow, leave out what the script does not take, and add its own options."""
    if "query=bash" not in arguments:
        yield
        return
    _, script, *typed = os.environ["COMP_LINE"].split(maxsplit=2)
    with suppress(UserError):
        outside.use(by_key(" ".join(typed).split()).get("recipe_path"))
    with redirect_stdout(io.StringIO()) as printed:
        yield
    found = [word for word in printed.getvalue().split() if not word.endswith("_schema")]
    print(*(found if script.endswith("train.py") else _of_script(Path(script), found)))


def _of_script(script: Path, of_training: Sequence[str]) -> list[str]:
    """Return the options that a script's docstring names, and those of train.py's that it takes, too."""
    code = script.read_text(encoding="utf-8")
    own = re.findall(r"^  (?:python \S+ )?(\w+[.=])", ast.get_docstring(ast.parse(code)) or "", re.M)
    named = re.search(r'options="([\w.:]+)"', code)
    options = pkgutil.resolve_name(named[1]) if named else object
    if not issubclass(options, Overriding):
        return own
    return [*own, *(word for word in of_training if not without_effect(re.split(r"\.?=|\.$", word)[0], options))]
