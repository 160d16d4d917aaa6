"""What comes from the Hugging Face hub, or from a folder in its form: where it is, and its tokenizer."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipes.data.text.files import TABLES, missing, near_to, typed
from recipes.data.text.tokenizers import CHATML, CHATML_TOKENS, Bytes, Characters, Tokenizer
from trainer.checkpoint.weights import defect
from trainer.errors import UserError, first_line, is_out_of_memory


class Pretrained(Tokenizer):
    """A tokenizer that ``AutoTokenizer`` opens, without the special tokens that it would add by itself."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token_id
        backend.no_truncation()  # which some files switch on, as padding
        backend.no_padding()
        roles = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if role.endswith("_token")}
        path = Path(name)
        label = path.parent.name if path.name in ("tokenizer", "best") and path.is_dir() else path.name  # of a run
        size = 1 + max(tokenizer.get_vocab().values())
        super().__init__(backend, f"tokenizer {label} of {size}", [] if end is None else [end], **roles)
        self.vocab_size, self._name, self._tokenizer = size, name, tokenizer
        self.special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        template = tokenizer.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template
        if tokenizer.unk_token_id != end:  # GPT-2's, which knows all bytes, is its end of a text
            self.unknown = tokenizer.unk_token_id

    @classmethod
    def open(cls, name: str, key: str) -> Pretrained:
        """Open a folder, or a hub id.

        Raises:
            UserError: beginning with ``key``, the option that the user set: there is no such tokenizer, or no network.
        """
        from transformers import AutoTokenizer

        wanted = "give another"
        if (file := Path(name).expanduser()).is_file() and file.suffix:
            remedy = typed("data.tokenizer", str(file.parent))
            raise UserError(f"{key} is a file, and its folder is wanted", remedy, mistake=typed("data.tokenizer", name))
        if Path(name).expanduser().is_dir():
            wanted = f'copy the model\'s own into it (AutoTokenizer.from_pretrained(…).save_pretrained("{name}"))'
        with opening(name, key, "has no tokenizer that opens", wanted) as place:
            try:
                tokenizer = AutoTokenizer.from_pretrained(**place)
            except ValueError as error:
                if "instantiate the backend tokenizer" not in str(error):
                    raise
                raise ValueError("it has no tokenizer.json, and nothing else that makes one") from None
            # Transformers makes up an empty one for a config alone; of T5, it has the sign of a space.
            if set(tokenizer.get_vocab()) <= {"▁", *tokenizer.all_special_tokens}:
                raise ValueError("there is none, or it has special tokens only")
            if not hasattr(tokenizer, "backend_tokenizer"):
                raise ValueError("it is none of the tokenizers library")
        return cls(name, tokenizer)

    def for_transformers(self) -> Any:
        return copy.deepcopy(self._tokenizer)  # it is changed by a call

    def for_chats(self) -> Tokenizer:
        if self.chat_template:
            return self
        start, end = CHATML_TOKENS
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.add_special_tokens({"eos_token": end, "extra_special_tokens": [start]})
        tokenizer.chat_template = CHATML
        return Pretrained(self._name, tokenizer)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def open_tokenizer(name: str, key: str) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` or ``init_from`` names: bytes, or a hub id or folder.

    Raises:
        UserError: beginning with ``key``, the option that the user set: there is no such tokenizer, or no network.
    """
    if name == "bytes":
        return Bytes()
    folder = Path(name).expanduser()
    return Characters.load(folder) if (folder / Characters.file).is_file() else Pretrained.open(name, key)


@contextmanager
def opening(name: str, key: str, failure: str, wanted: str) -> Iterator[dict[str, Any]]:
    """Give the arguments of ``from_pretrained`` for a folder or a hub id, and turn errors into the user's.

    Where the hub does not answer, an id is opened from the local cache.

    Args:
        name: the folder; or the hub id, perhaps with ``@`` and a revision.
        key: the option that named it, for messages.
        failure: what is wrong with one that does not open, for messages.
        wanted: what to give instead, for messages.

    Raises:
        UserError: it does not open, or only by running code of its own; or the hub does not answer, and it is not in
            the local cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

    path = local_path(name, key, wanted)
    hub_id, _, revision = name.partition("@")
    silent = "" if path else _unreachable(constants.ENDPOINT, int(time.monotonic() / 60))
    place = {"pretrained_model_name_or_path": str(path or hub_id), "local_files_only": bool(path or silent)}
    place["trust_remote_code"] = False  # else transformers asks whether to run a model's own code
    try:
        yield place | {"revision": revision or "main"}
    except Exception as error:  # of transformers, the hub and its HTTP client, and of whatever reads a damaged file
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        for file in sorted(path.glob("*.*")) if path else ():
            if what := defect(file):
                raise UserError(f"{key}: {file.name} {what}") from error
        if "trust_remote_code" in str(error):
            raise UserError(f"{key} {failure}: it brings code of its own, which is not run; {wanted}") from error
        absent, near = "there is no such file or folder here", near_to(Path(name))
        if silent:
            raise UserError(
                f"{key}: {absent}, it is not complete in the local cache, and {silent}; {wanted}{near}"
            ) from error
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
            chain.append(cause)
        http = next((cause for cause in chain if isinstance(cause, HTTPError)), None)
        if http and not isinstance(http, HfHubHTTPError):  # no answer, where transformers speaks of a wrong folder
            raise UserError(f"{key} could not be downloaded ({first_line(http)}); try again") from error
        if isinstance(http, RepositoryNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
            wanted = f"{absent}{near}; check the id; if it is gated or private, get access on its page, then run hf "
            wanted += "auth login or set HF_TOKEN"
        elif not path:
            wanted += "; hf cache rm removes a damaged copy"
        raise UserError(f"{key} {failure} ({first_line(error)}); {wanted}") from error


def local_path(name: str, key: str, wanted: str) -> Path | None:
    """Return the file or folder that a name means; None: it is a hub id.

    Raises:
        UserError: it is a path, and nothing is there; ``key`` and ``wanted`` see ``opening``.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    is_file = name.endswith((*TABLES, ".txt"))
    if is_file or name.startswith(("/", ".", "~")) or name.partition("@")[0].count("/") > 1:
        raise missing(key, wanted)
    return None


@lru_cache
def _unreachable(address: str, minute: int) -> str:
    """Return why the hub at ``address`` cannot be asked; empty: it answers.

    It is asked once a minute: a try may take ten seconds. The libraries take what they cached by themselves, but first
    try for half a minute, with some files.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)  # an error status is an answer
    except Exception as error:  # of the hub's HTTP client; also where HF_HUB_OFFLINE is set
        return f"{address} does not answer ({first_line(error)})"
    return ""
