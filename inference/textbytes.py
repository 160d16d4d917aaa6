"""How many bytes of text each token stands for: losses per byte compare models with different tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trainer.errors import UserError


def bytes_of_tokens(folder: Path, vocabulary: int) -> np.ndarray:
    """Return the length in UTF-8 of the text of each token id of an exported tokenizer, int64.

    Special tokens (such as the end of a document) stand for no text. A token of a byte-level BPE has one character for
    each byte, also where it is only a part of a character; elsewhere a token's text is encoded.

    Args:
        folder: holds the tokenizer.
        vocabulary: the model's number of ids; those that the tokenizer does not have stand for nothing.

    Raises:
        UserError: the folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no valid tokenizer ({error}); copy the model's own into it") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = (json.loads(backend.to_str())["decoder"] or {}) if backend else {}
    byte_level = "ByteLevel" in json.dumps(decoder)
    sizes = np.zeros(vocabulary, dtype=np.int64)
    special = set(tokenizer.all_special_tokens)
    for token, number in tokenizer.get_vocab().items():
        if number < vocabulary and token not in special:
            sizes[number] = len(token) if byte_level else _length(token)
    return sizes


def _length(token: str) -> int:
    if token.startswith("<0x") and len(token) == 6:  # sentencepiece's fallback to single bytes
        return 1
    return len(token.replace("▁", " ").encode())
