"""Tokenizers of the text data: characters, bytes, and a byte-pair encoding trained on the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from recipes.data.text.source import Tokenizer
from trainer.errors import UserError

OWN_BPE = "bpe"
"""The default of ``data.tokenizer``."""

END = "<|endoftext|>"
"""What GPT-2 puts between two documents."""

_BPE_TRAINING_CHARACTERS = 200_000_000
"""More text takes memory and minutes, and hardly changes the merges."""


class OwnTokenizer(Tokenizer):
    """One of the ``tokenizers`` library, made here.

    Args:
        backend: its ``tokenizers.Tokenizer`` (which has no type stubs).
        label: see ``Tokenizer``.
        separator: see there.
        settings: of transformers' tokenizer, such as ``eos_token``.
    """

    def __init__(self, backend: Any, label: str, separator: Sequence[int] = (), **settings: str) -> None:
        self._backend, self.label, self.separator, self._settings = backend, label, list(separator), settings
        self.vocab_size: int = backend.get_vocab_size()

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text, encoded on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that exist, the ends of documents shown; bytes that are not UTF-8 are U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, folder: Path) -> None:
        """Write a folder that AutoTokenizer opens, with the same ids."""
        self._backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # it would take spaces before punctuation away
            # Some versions add token_type_ids, for which GPT-2 would look up embeddings.
            "model_input_names": ["input_ids", "attention_mask"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config | self._settings, indent=2))


def word_level(ids: dict[str, int], pattern: str) -> Any:
    """Return a ``tokenizers.Tokenizer`` with an id for each text that the pattern matches; all others are errors."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel(ids))  # without an id for what is unknown
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()  # no spaces between the tokens
    return backend


class Bytes(OwnTokenizer):
    """The 256 bytes of UTF-8."""

    def __init__(self) -> None:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # A byte-level BPE that merges nothing: each byte has a printable character that stands for it.
        backend = tokenizers.Tokenizer(models.BPE({name: byte for byte, name in bytes_to_unicode().items()}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend, "256 bytes", b"\n")

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class Characters(OwnTokenizer):
    """Every character that the corpus uses, and the line end, in code point order (as nanoGPT does)."""

    file = "characters.json"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._ids = {character: id for id, character in enumerate(characters)}
        self._table = np.zeros(max(map(ord, characters)) + 1, dtype=np.uint32)
        self._table[[ord(character) for character in characters]] = np.arange(len(characters))
        super().__init__(word_level(self._ids, r"[\s\S]"), f"{len(characters)} characters", [self._ids["\n"]])

    @classmethod
    def collect(cls, texts: Iterable[str]) -> Characters:
        """Collect the characters of all texts, and the line end, which separates documents."""
        found = {"\n"}
        for text in texts:
            found |= set(text)
        return cls("".join(sorted(found)))

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text. Raises UserError for a character that the corpus does not have."""
        if unknown := set().union(*texts) - self._ids.keys():
            raise UserError(
                f"the character {min(unknown)!r} is not among the {self.label} of the training text; remove it from "
                "this text, or train with data.tokenizer=bytes, which has every character"
            )
        return [self._table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)] for text in texts]

    def save(self, folder: Path) -> None:
        """Write ``characters.json`` beside what AutoTokenizer opens."""
        (folder / self.file).write_text(json.dumps(self.characters))
        super().save(folder)

    @classmethod
    def load(cls, folder: Path) -> Characters:
        """Open what ``save`` wrote."""
        return cls(json.loads((folder / cls.file).read_text()))


class BytePairs(OwnTokenizer):
    """A byte-level BPE like GPT-2's, of the corpus's own: any text survives encoding and decoding."""

    def __init__(self, backend: Any) -> None:
        end = [backend.token_to_id(END)]
        super().__init__(backend, f"own BPE of {backend.get_vocab_size()}", end, eos_token=END, bos_token=END)
        self.special = dict.fromkeys(end, END)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairs:
        """Learn at most ``vocab_size`` tokens: 256 bytes, the end of a document, and what was seen twice."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_at_most(texts, _BPE_TRAINING_CHARACTERS), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> BytePairs:
        """Open what ``save`` wrote."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))


def _at_most(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)
