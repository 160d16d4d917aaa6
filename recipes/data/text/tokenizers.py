"""Tokenizers of the text data: characters, bytes, and a byte-pair encoding trained on the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trainer.errors import UserError
from trainer.files import read_json
from trainer.terminal import work

OWN_BPE = "bpe"
"""The default of ``data.tokenizer``."""

END = "<|endoftext|>"
"""What GPT-2 puts between two documents."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Special tokens that begin and end a message in ``CHATML``."""
CHATML = """\
{%- for message in messages %}
    {%- if tools or message.tool_calls %}{{ raise_exception("ChatML has no tools") }}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
"""The chat template of tokenizers that bring none."""

_BPE_TRAINING_CHARACTERS = 200_000_000
"""More text takes memory and minutes, and hardly changes the merges."""
_BPE_TRAINING_WORDS = 10_000_000
"""Bytes of the different words in it, for each of which training takes some 120 bytes. Prose and source code have half
as many; without spaces between words, as in Chinese, nearly every phrase is one."""
_WORD = re.compile(r"[^\W_]{4,}")


class Tokenizer:
    """Text to token ids and back, by a tokenizer of the ``tokenizers`` library.

    Args:
        backend: the library's own (which has no type stubs).
        label: name for the start block, such as ``own BPE of 4096``.
        separator: ids between two documents.
        roles: texts of special tokens, by transformers' names of their roles, such as ``eos_token``.
    """

    special: Mapping[int, str] = {}
    """Special tokens by id, as they are written: where a text has one, it becomes the id, which is no text."""
    unknown: int | None = None
    """The id that stands for what it cannot encode; None: it can encode all, or such text is an error."""
    chat_template: str | None = None
    """What makes text of a chat, in Jinja, as transformers has it; None: it brings none."""

    def __init__(self, backend: Any, label: str, separator: Sequence[int] = (), **roles: str) -> None:
        self._backend, self.label, self.separator, self.roles = backend, label, list(separator), roles
        self.vocab_size: int = backend.get_vocab_size()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which ids are stored: uint16, or uint32 for a large vocabulary."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def identity(self) -> str:
        """Return everything that decides how it encodes."""
        return str(self._backend.to_str())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ids: list[int] = np.asarray(self.encode_many([text])[0]).tolist()
        return ids

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text, encoded on all cores: a list or one-dimensional array of integers."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _untrimmed(self) -> Any:
        """The backend without what it does to the tokens' places: some take spaces away from them."""
        import tokenizers
        from tokenizers import processors

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return backend

    def encode_with_places(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield of each text the ids, int64, and the characters that each stands for, int64 ids × (first, end).

        Tokens that are bytes of one character have this one's place.
        """
        for encoding in self._untrimmed.encode_batch(texts, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def added_tokens(self) -> list[str]:
        """Return the special tokens, as they are written: text that has one becomes the token."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def for_chats(self) -> Tokenizer:
        """Return this tokenizer, if it brings a chat template; else it with ``CHATML``, whose end is that of a text."""
        if self.chat_template:
            return self
        start, end = CHATML_TOKENS
        tokenizer = self.with_special({start: start, end: end}, "$A | $A $B")
        tokenizer = Tokenizer(tokenizer._backend, self.label, self.separator, **self.roles | {"eos_token": end})
        tokenizer.special = {**self.special, **{tokenizer._backend.token_to_id(text): text for text in CHATML_TOKENS}}
        tokenizer.chat_template = CHATML
        return tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that exist, special tokens shown; bytes that are not UTF-8 are U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token, by transformers' name of its role (``cls_token``) or by its text."""
        found: int | None = self._backend.token_to_id(self.roles.get(role, role))
        return found

    def with_special(self, texts: dict[str, str], template: str) -> Tokenizer:
        """Return a tokenizer with the special tokens of a recipe; this one, where it has all of them in other words.

        Args:
            texts: the tokens as they are written, by role, or by text where transformers has no role for them.
            template: what is encoded elsewhere for one text and, after a ``|``, for two, as in tokenizers'
                TemplateProcessing, with ``{role}`` for a special token.
        """
        if all(self.token_id(role) is not None for role in texts):
            return self
        import tokenizers
        from tokenizers import AddedToken, processors

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts.values()])
        names = self.roles | texts
        single, pair = (part.strip().format(**names) for part in template.split("|"))
        used = [(text, backend.token_to_id(text)) for role, text in names.items() if f"{{{role}}}" in template]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
        roles = {role: text for role, text in texts.items() if role.endswith("_token")}
        return Tokenizer(backend, self.label, self.separator, **self.roles | roles)

    def for_transformers(self) -> Any:
        """Return it as transformers has it: called, it adds the special tokens and cuts what is too long."""
        import tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())  # it is changed by a call
        return PreTrainedTokenizerFast(tokenizer_object=backend, **self.roles)

    def save(self, folder: Path) -> None:
        """Write a folder that AutoTokenizer opens, with the same ids."""
        self._backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # it would take spaces before punctuation away
            # Some versions add token_type_ids, for which GPT-2 would look up embeddings.
            "model_input_names": ["input_ids", "attention_mask"],
        }
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | self.roles | template, indent=2))


def word_level(ids: dict[str, int], pattern: str, others: str = "isolated") -> Any:
    """Return a ``tokenizers.Tokenizer`` with an id for each text that the pattern matches; all others are errors, or
    ``removed``.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel(ids))  # without an id for what is unknown
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), others, invert=others == "removed")
    backend.decoder = decoders.Fuse()  # no spaces between the tokens
    return backend


def numbers(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of ids alone: ``<123>`` stands for 123; other text has no tokens."""
    ids = {f"<{number}>": number for number in range(vocab_size)}
    backend = word_level(ids, r"<\d+>", others="removed")
    backend.decoder = None  # a space between the tokens, so that text that is cut at a word has whole ones
    return Tokenizer(backend, "numbers")


class Bytes(Tokenizer):
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


class Characters(Tokenizer):
    """Every character that the corpus uses, and the line end, in code point order (as nanoGPT does)."""

    file = "characters.json"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._ids = {character: id for id, character in enumerate(characters)}
        self._table = np.zeros(max(map(ord, characters)) + 1, dtype=np.uint32)
        self._table[[ord(character) for character in characters]] = np.arange(len(characters))
        super().__init__(word_level(self._ids, r"[\s\S]"), f"{len(characters)} characters", [self._ids["\n"]])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 0) -> Characters:
        """Collect the characters of all texts, however many, and the line end, which separates documents."""
        characters = {"\n"}
        for text in texts:  # one at a time: together they may be gigabytes
            characters.update(text)
        return cls("".join(sorted(characters)))

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text, looked up (the library splits a text at each character, which takes a hundred
        times as long). Raises UserError for characters that the corpus does not have.
        """
        if unknown := sorted(set().union(*texts) - self._ids.keys()):
            raise UserError(
                f"not among the {self.label} of the training text: {''.join(unknown)!r:.60} ({len(unknown)} in all); "
                "remove them from this text, or train a new model, without init_from, with data.tokenizer=bytes, which "
                "has every character"
            )
        return [self._table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)] for text in texts]

    def save(self, folder: Path) -> None:
        """Write ``characters.json`` beside what AutoTokenizer opens."""
        (folder / self.file).write_text(json.dumps(self.characters))
        super().save(folder)

    @classmethod
    def load(cls, folder: Path) -> Characters:
        """Open what ``save`` wrote."""
        return cls(read_json(folder / cls.file))


class BytePairs(Tokenizer):
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
        tokenizer.train_from_iterator(_enough(texts), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> BytePairs:
        """Open what ``save`` wrote."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))


def _enough(texts: Iterable[str]) -> Iterator[str]:
    """Yield the text that a BPE is trained on."""
    characters, words, word_bytes = 0, set[str](), 0
    for text in texts:
        if characters >= _BPE_TRAINING_CHARACTERS or word_bytes >= _BPE_TRAINING_WORDS:
            return
        yield text[: _BPE_TRAINING_CHARACTERS - characters]
        characters += len(text)
        new = set(_WORD.findall(text)) - words
        words |= new
        word_bytes += len("".join(new).encode())


OF_TEXT: dict[str, type[BytePairs] | type[Characters]] = {OWN_BPE: BytePairs, "chars": Characters}
"""The values of ``data.tokenizer`` that are made of the text."""


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer, or how one is made of the text."""

    known: Tokenizer | None
    """None: it is made of the text."""
    name: str
    """``data.tokenizer``."""
    vocab_size: int
    """Most tokens of one that is made of the text."""

    def identity(self) -> Any:
        """Return JSON that changes whenever the ids of a text would."""
        from tokenizers import __version__

        return self.known.identity() if self.known else [self.name, self.vocab_size, __version__]

    def made(self, texts: Iterable[str], folder: Path) -> Tokenizer:
        """Return the tokenizer; one that is made of ``texts`` is written to the folder, for ``opened``."""
        if self.known:
            return self.known
        with work(f"making the tokenizer ({self.name})"):
            tokenizer = OF_TEXT[self.name].train(texts, self.vocab_size)
        tokenizer.save(folder)
        return tokenizer

    def opened(self, folder: Path) -> Tokenizer:
        """Return the tokenizer that ``made`` returned."""
        return self.known or OF_TEXT[self.name].load(folder)
