"""Tab completion in bash and zsh: Hydra answers what may follow, and this says how a shell asks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress

from trainer.config import outside
from trainer.config.registration import by_key
from trainer.errors import UserError

# Hydra's own would run any Python file to ask it. The other scripts take the options of train.py, too.
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
def without_schemas(arguments: Sequence[str]) -> Iterator[None]:
    """Leave out what is no choice of a user's where Hydra prints what may follow."""
    if "query=bash" not in arguments:
        yield
        return
    with suppress(UserError):
        outside.use(by_key(os.environ.get("COMP_LINE", "").split()).get("recipe_path"))
    with redirect_stdout(io.StringIO()) as printed:
        yield
    print(" ".join(word for word in printed.getvalue().split() if not word.endswith("_schema")))
