"""Tokenizers of the text data: characters, bytes, a byte-pair encoding trained on the text, and pretrained ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trainer.errors import UserError, first_line

OWN_BPE = "bpe"
"""The default of ``data.tokenizer``."""

END = "<|endoftext|>"
"""What GPT-2 puts between two documents."""

_answered: set[str] = set()
"""Addresses of the hub that have answered in this process."""

_BPE_TRAINING_CHARACTERS = 200_000_000
"""More text takes memory and minutes, and hardly changes the merges."""


class Tokenizer:
    """Text to token ids and back, by a tokenizer of the ``tokenizers`` library.

    Args:
        backend: the library's own (which has no type stubs).
        label: name for the start block, such as ``own BPE of 4096``.
        separator: ids between two documents.
        settings: of transformers' tokenizer, such as ``eos_token``.
    """

    special: Mapping[int, str] = {}
    """Special tokens by id, as they are written: where a text has one, it becomes the id, which is no text."""

    def __init__(self, backend: Any, label: str, separator: Sequence[int] = (), **settings: str) -> None:
        self._backend, self.label, self.separator, self._settings = backend, label, list(separator), settings
        self.vocab_size: int = backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ids: list[int] = np.asarray(self.encode_many([text])[0]).tolist()
        return ids

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text, encoded on all cores: a list or one-dimensional array of integers."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that exist, special tokens shown; bytes that are not UTF-8 are U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token, by transformers' name of its role (``cls_token``) or by its text."""
        found: int | None = self._backend.token_to_id(self._settings.get(role, role))
        return found

    def with_special(self, texts: dict[str, str], template: str) -> Tokenizer:
        """Return the tokenizer with the special tokens of a recipe, in the place of others with their roles.

        Args:
            texts: the tokens as they are written, by role, or by text where transformers has no role for them.
            template: what is encoded elsewhere for one text and, after a ``|``, for two, as in tokenizers'
                TemplateProcessing, with ``{role}`` for a special token.
        """
        import tokenizers
        from tokenizers import AddedToken, processors

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts.values()])
        names = self._settings | texts
        single, pair = (part.strip().format(**names) for part in template.split("|"))
        used = [(text, backend.token_to_id(text)) for role, text in names.items() if f"{{{role}}}" in template]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
        roles = {role: text for role, text in texts.items() if role.endswith("_token")}
        return Tokenizer(backend, self.label, self.separator, **self._settings | roles)

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


class TokenizerPlan(NamedTuple):
    """How to make or load the tokenizer of a corpus."""

    identity: Any
    """JSON of what its ids depend on beside the text."""
    task: str
    """The log message while the user waits, such as ``training a BPE of 4096``."""
    make: Callable[[Iterable[str]], Tokenizer]
    """Takes the pieces of the text."""
    load: Callable[[Path], Tokenizer]
    """Opens the folder that the tokenizer's ``save`` wrote to."""
    from_training: bool = False
    """Whether it is made of the training text alone."""


def plan(choice: str, key: str, vocab_size: int) -> TokenizerPlan:
    """Return how to make the tokenizer that ``data.tokenizer`` means.

    Args:
        choice: bpe, chars, bytes, or a hub id or folder.
        key: the option that the user set, for messages.
        vocab_size: of a BPE.

    Raises:
        UserError: there is no such tokenizer, or no network.
    """
    if choice == OWN_BPE:
        from tokenizers import __version__

        identity = ["bpe", vocab_size, __version__]
        task = f"training a BPE of {vocab_size}"
        return TokenizerPlan(identity, task, lambda texts: BytePairs.train(texts, vocab_size), BytePairs.load, True)
    if choice == "chars":
        return TokenizerPlan("chars", "collecting its characters", Characters.collect, Characters.load)
    if choice == "bytes":
        return TokenizerPlan("bytes", "storing its bytes", lambda _: Bytes(), lambda _: Bytes())
    folder = Path(choice).expanduser()
    if (folder / Characters.file).is_file():
        known = Characters.load(folder)
        task = f"encoding with {known.label}"
        return TokenizerPlan(["chars", known.characters], task, lambda _: known, Characters.load)
    opened = Pretrained.open(choice, key)
    return TokenizerPlan(opened.identity(), f"encoding with {opened.label}", lambda _: opened, lambda _: opened)


def word_level(ids: dict[str, int], pattern: str) -> Any:
    """Return a ``tokenizers.Tokenizer`` with an id for each text that the pattern matches; all others are errors."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel(ids))  # without an id for what is unknown
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()  # no spaces between the tokens
    return backend


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
    def collect(cls, texts: Iterable[str]) -> Characters:
        """Collect the characters of all texts, and the line end, which separates documents."""
        return cls("".join(sorted({"\n"}.union(*texts))))

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text, looked up (the library splits a text at each character, which takes a hundred
        times as long). Raises UserError for a character that the corpus does not have.
        """
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
        return cls(name, tokenizer)

    def identity(self) -> str:
        """Return everything that decides how it encodes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(backend.to_str()) if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)

    def token_id(self, role: str) -> int | None:
        if role in self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
            found: int | None = getattr(self._tokenizer, f"{role}_id")
            return found
        return self._vocabulary.get(role)

    def with_special(self, texts: dict[str, str], template: str) -> Tokenizer:
        if all(self.token_id(role) == self._vocabulary.get(text, -1) for role, text in texts.items()):
            return self
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"the {self.label} lacks {', '.join(texts)}; use another, or data.tokenizer=bpe")
        roles = self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES
        own = {role: str(text) for role, text in self._tokenizer.special_tokens_map.items() if role in roles}
        return Tokenizer(backend, self.label, self.separator, **own).with_special(texts, template)

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
        self._tokenizer.save_pretrained(str(folder))


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
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if not local and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError(f"{key}: there is no such folder; {remedy}")
    offline = not local and not hub_reachable()
    try:
        yield {
            "pretrained_model_name_or_path": str(folder) if local else name,
            "local_files_only": local or offline,
        }
    except (OSError, ValueError, ImportError) as error:
        if offline:
            failure = "is not in the local cache and the Hugging Face hub cannot be reached"
            raise UserError(f"{key} {failure}; {remedy}") from error
        raise UserError(f"{key} {failure} ({first_line(error)}); {remedy}") from error


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
