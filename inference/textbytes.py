"""How many bytes of text each token stands for: losses per byte compare models with different tokenizers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def bytes_of_tokens(tokenizer: Any, vocabulary: int) -> np.ndarray:
    """Return the length in UTF-8 of the text of each token id of one of transformers' tokenizers, int64.

    Special tokens (such as the end of a document) stand for no text. A token of a byte-level BPE has one character for
    each byte, also where it is only a part of a character; elsewhere a token's text is encoded.

    Args:
        tokenizer: of an exported folder.
        vocabulary: the model's number of ids; those that the tokenizer does not have stand for nothing.
    """
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
