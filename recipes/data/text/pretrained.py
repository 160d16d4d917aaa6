"""What comes from the Hugging Face hub, or from a folder in its form: where it is, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from recipes.data.text.tokenizers import Bytes, Characters, Tokenizer
from trainer.errors import UserError, first_line

_answered: set[str] = set()
"""Addresses of the hub that have answered in this process."""


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
        self.vocab_size, self._tokenizer = size, tokenizer
        self.special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

    @classmethod
    def open(cls, name: str, key: str) -> Pretrained:
        """Open a folder, or a hub id.

        Raises:
            UserError: beginning with ``key``, the option that the user set: there is no such tokenizer, or no network.
        """
        from transformers import AutoTokenizer

        remedy = "data.tokenizer=bpe, chars or bytes need no network"
        if Path(name).expanduser().is_dir():
            remedy = f'copy the model\'s own into it (AutoTokenizer.from_pretrained(…).save_pretrained("{name}"))'
        with opening(name, key, "has no tokenizer that opens", remedy) as place:
            tokenizer = AutoTokenizer.from_pretrained(**place)
            # Transformers makes up an empty one where there is only a model's config.
            if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
                raise ValueError("it has special tokens only")
            if not hasattr(tokenizer, "backend_tokenizer"):
                raise ValueError("it is none of the tokenizers library")
        return cls(name, tokenizer)

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
def opening(name: str, key: str, failure: str, remedy: str) -> Iterator[dict[str, Any]]:
    """Give the arguments of ``from_pretrained`` for a folder or a hub id, and turn its errors into the user's.

    Without a network an id is opened from the local cache.

    Args:
        name: the folder, or the hub id.
        key: the option that named it, for messages.
        failure: what is wrong with one that does not open, for messages.
        remedy: what to do about it.

    Raises:
        UserError: it does not open, or the hub cannot be reached and it is not in the local cache.
    """
    path = local_path(name, key, remedy)
    offline = path is None and not hub_reachable()
    try:
        yield {"pretrained_model_name_or_path": str(path or name), "local_files_only": bool(path) or offline}
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if offline:
            failure = "is not in the local cache and the Hugging Face hub cannot be reached"
            raise UserError(f"{key} {failure}; {remedy}") from error
        raise UserError(f"{key} {failure} ({first_line(error)}); {remedy}") from error


def local_path(name: str, key: str, remedy: str) -> Path | None:
    """Return the file or folder that a name means; None: it is a hub id.

    Raises:
        UserError: it is a path, and nothing is there; ``key`` and ``remedy`` see ``opening``.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{key}: there is no such file or folder; {remedy}")
    return None


def hub_reachable(timeout_s: float = 8) -> bool:
    """Return whether the Hugging Face hub answers: the downloads of a machine without a network retry for minutes."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    if constants.ENDPOINT not in _answered:
        try:
            get_session().head(constants.ENDPOINT, timeout=timeout_s)  # an error status is an answer, too
        except Exception:  # of whichever library the hub's client is built on
            return False
        _answered.add(constants.ENDPOINT)
    return True
