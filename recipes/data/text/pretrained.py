"""Tokenizers that transformers opens, and whether the Hugging Face hub can be reached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from recipes.data.text.source import Tokenizer
from trainer.errors import UserError, first_line


class Pretrained(Tokenizer):
    """Any tokenizer that ``AutoTokenizer`` opens, without the special tokens it would add by itself."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size = max(len(tokenizer), 1 + max(self._vocabulary.values()))
        path = Path(name)
        label = path.parent.name if path.name in ("tokenizer", "best") and path.is_dir() else path.name  # of a run
        self.label = f"tokenizer {label} of {self.vocab_size}"
        self.separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

    @classmethod
    def open(cls, name: str, key: str) -> Pretrained:
        """Open a folder, or a hub id: from the local cache if it is there, else from the network.

        Raises:
            UserError: beginning with ``key``, the option that the user set: there is no such tokenizer, or no network.
        """
        from transformers import AutoTokenizer

        remedy = "data.tokenizer=bpe, chars or bytes need no network"
        place = located(name, key, remedy)
        if Path(name).expanduser().is_dir():
            remedy = f'copy the model\'s own into it (AutoTokenizer.from_pretrained(…).save_pretrained("{name}"))'
        try:
            tokenizer = AutoTokenizer.from_pretrained(**place)
            # Transformers makes up an empty one where there is only a model's config.
            if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
                raise ValueError("it has special tokens only")
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"{key} has no tokenizer that opens ({first_line(error)}); {remedy}") from None
        return cls(name, tokenizer)

    def identity(self) -> str:
        """Return everything that decides how it encodes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(backend.to_str()) if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token, by transformers' name of its role (``cls_token``) or by its text."""
        if role in self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
            found: int | None = getattr(self._tokenizer, f"{role}_id")
            return found
        return self._vocabulary.get(role)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that exist, special tokens shown."""
        known = [id for id in ids if 0 <= id < self.vocab_size]
        text: str = self._tokenizer.decode(known, clean_up_tokenization_spaces=False)
        return text

    def save(self, folder: Path) -> None:
        """Write a folder that AutoTokenizer opens."""
        self._tokenizer.save_pretrained(str(folder))


def located(name: str, key: str, remedy: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a folder, or for a hub id: from the local cache if it is there.

    Args:
        name: the folder, or the hub id.
        key: the option that named it, for messages.
        remedy: what to do about it.

    Raises:
        UserError: there is no such folder, or the hub cannot be reached.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(name).expanduser()
    if folder.is_dir():
        return {"pretrained_model_name_or_path": str(folder), "local_files_only": True}
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{key}: there is no such folder; {remedy}")
    # One file of it that was downloaded before, and so the rest of it most likely.
    names = ("config.json", "tokenizer_config.json")
    cached = any(isinstance(try_to_load_from_cache(name, each), str) for each in names)
    if not cached and not hub_reachable():
        raise UserError(f"{key} is not in the local cache and the Hugging Face hub cannot be reached; {remedy}")
    return {"pretrained_model_name_or_path": name, "local_files_only": cached}


def hub_reachable(timeout_s: float = 8) -> bool:
    """Return whether the Hugging Face hub answers within ``timeout_s``: downloads would retry for most of a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = []

    def ask() -> None:
        with suppress(Exception):  # of whichever library the hub's client is built on
            get_session().head(constants.ENDPOINT, timeout=timeout_s)  # an error status is an answer, too
            answered.append(True)

    thread = Thread(target=ask, daemon=True)  # looking up a name has no timeout
    thread.start()
    thread.join(timeout_s)
    return bool(answered)
