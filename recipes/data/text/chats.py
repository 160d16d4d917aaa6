"""Rows that are chats: which columns mean one, the text that a template makes of it, and which tokens are targets."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.display import counted, quantity, shortened
from recipes.data.text.cache import built, completed
from recipes.data.text.files import typed
from recipes.data.text.tokenizers import CHATML, CHATML_TOKENS, OWN_BPE, Tokenizer, TokenizerChoice
from recipes.data.text.tokens import Samples, TokenData, log, warn_of_unknown
from trainer.errors import UserError, first_line
from trainer.files import read_json, write_json
from trainer.terminal import work

FORMS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): (),
    ("conversations",): (),
    ("prompt", "completion"): (),
    ("instruction", "output"): ("input",),
}
"""Columns that make a row a chat, and others that it may have beside ``tools``; the first form that fits is taken."""
WANTED = "chats are in columns of these names: messages, conversations, prompt and completion, instruction and output"
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""What the roles are called here, by their names in data, such as those of ShareGPT."""
TRAIN_ON = ("assistant", "all")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What begins the assistant's text in a template, for transformers."""
_AT_ONCE = 200
"""Rows in memory at a time."""
_SHOWN = 60
"""Characters of a person's question that are shown."""


def chat_columns(features: Container[str]) -> tuple[str, ...]:
    """Return the columns that make the rows chats; empty: they are none."""
    for form, optional in FORMS.items():
        if all(name in features for name in form):
            return (*form, *(name for name in (*optional, "tools") if name in features))
    return ()


def used_columns(name: str, features: Mapping[str, Any], text_column: str | None) -> tuple[str, ...]:
    """Return the columns that make the rows chats; empty: they are none, or a column of text is named.

    Args:
        name: ``data.name``, for messages.
        features: types of the columns, by their names.
        text_column: the one that is named.

    Raises:
        UserError: one column of a chat is named, or they are pairs of a better and a worse answer.
    """
    columns = chat_columns(features)
    if text_column is None:
        if not columns and {"chosen", "rejected"} <= features.keys():
            raise UserError(f"data.name={name} has pairs of answers, chosen and rejected, which are not trained on")
        return columns
    chat = chat_columns(features.keys() - {"messages", "conversations"})  # which may be texts
    if text_column in chat:
        problem = f"data.text_column={text_column} is one column of chats ({', '.join(chat)})"
        mistake = typed("data.text_column", text_column)
        raise UserError(f"{problem}, which are trained on as a whole", "", mistake=mistake)
    return ()


def messages_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of a row, each a dict of ``role``, ``content`` and whatever else it has.

    Args:
        row: values by the columns of a form.
        where: the row's place, for messages.

    Raises:
        UserError: it is no chat.
    """
    if "instruction" in row:
        given = _text(row["instruction"], "instruction", where)
        more = _text(row.get("input"), "input", where)
        asked, answered = "\n\n".join(filter(None, [given, more])), _text(row["output"], "output", where)
        turns = _turn("user", asked) + _turn("assistant", answered)
    elif "prompt" in row:
        sides = {"prompt": "user", "completion": "assistant"}
        turns = []
        for name, role in sides.items():
            value = row[name]
            turns += value if isinstance(value, list) else _turn(role, _text(value, name, where))
    else:
        (name,) = row.keys() & {"messages", "conversations"}
        turns = row[name]
        turns = _parsed(turns, name, where)
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where} has no messages; leave such rows out")
    return [_message(turn, f"{where}, message {number}") for number, turn in enumerate(turns)]


def _parsed(value: Any, name: str, where: str) -> Any:
    """Return what a text of JSON says; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        problem = f"{where}: {name} is the text {value[:_SHOWN]!r}, and no JSON; make it a list"
        raise UserError(f"{problem}, or train on the text of one column: data.text_column=…") from None


def _turn(role: str, content: str) -> list[dict[str, str]]:
    """Return the message; none of an empty text: such a row has no target, and is left out."""
    return [{"role": role, "content": content}] if content else []


def _text(value: Any, name: str, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {name} is {_kind(value)}; write it as a text")
    return value or ""


def _message(turn: Any, where: str) -> dict[str, Any]:
    turn = without_none(turn)
    if not isinstance(turn, dict):
        raise UserError(f'{where} is {_kind(turn)}; a message is {{"role": "user", "content": "…"}}')
    keys = ("role", "content") if "role" in turn else ("from", "value")
    if keys[0] not in turn:
        has = shortened(list(turn), 10) or "nothing"
        raise UserError(f"{where} has {has}; a message has role and content, or from and value")
    role, content = (turn.get(key) for key in keys)
    if role not in ROLES:
        raise UserError(f"{where} has the {keys[0]} {role!r}; known are {', '.join(ROLES)}")
    others = {key: value for key, value in turn.items() if key not in keys}
    if content is None and "tool_calls" in others:
        return {"role": ROLES[role], **others}
    if not isinstance(content, str):
        lacks = f"{shortened(list(turn), 10)}, and no {keys[1]}"
        has = lacks if content is None else f"as {keys[1]} {_kind(content)}"
        raise UserError(f"{where} has {has}; a message has a text")
    return {"role": ROLES[role], "content": content, **others}


def _kind(value: Any) -> str:
    kind = {str: "a text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return kind.get(type(value), "nothing" if value is None else type(value).__name__)


def without_none(value: Any) -> Any:
    """Return JSON without the keys whose value is None: ``datasets`` gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


class Template:
    """The chat template of a tokenizer: the text of a chat, and the characters that the assistant writes.

    These are those between the template's ``{% generation %}`` marks. Where it has none, they follow from the text of
    the turns before: a turn of the assistant begins where the text of those before it ends, with what asks the model
    for an answer (``add_generation_prompt``), and ends where the text with this turn does.

    Args:
        text: in Jinja.
        train_on: ``assistant``, or ``all``: every character then counts as the assistant's.
        label: of the tokenizer, for messages.
        variables: what else the template knows: the special tokens, by transformers' names of their roles.
    """

    def __init__(self, text: str, train_on: str, label: str = "", variables: Mapping[str, str] | None = None) -> None:
        self.text, self.train_on, self.label, self.variables = text, train_on, label, variables or {}
        self.marked = train_on == "assistant" and bool(_MARKS.search(text))

    def render(self, messages: list[dict[str, Any]], tools: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the assistant's spans in it: first character, and the one after the last.

        Raises:
            UserError: the template refuses the chat, or its earlier turns change when later ones are added.
        """
        text, spans = self._rendered(messages, tools, where, marks=self.marked)
        if self.train_on == "all":
            return text, [(0, len(text))]
        return text, spans if self.marked else self._by_turns(messages, tools, text, where)

    def _by_turns(self, messages: list[dict[str, Any]], tools: Any, text: str, where: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = messages[: number + 1]
            after = text if len(until) == len(messages) else self._rendered(until, tools, where)[0]
            if number:
                before = self._rendered(messages[:number], tools, where, ask=True)[0]
            else:  # many templates have no text without a message: what asks for an answer is that after this one
                asked = self._rendered(until, tools, where, ask=True)[0].removeprefix(after)
                before = text[: text.find(asked) + len(asked)] if asked in text else ""
            if not (before and text.startswith(after) and after.startswith(before)):
                raise UserError(
                    f"{where}: the chat template of {self.label} changes earlier turns when later ones are added, so "
                    "that the assistant's text is not known from the turns; train on every token of the chats",
                    "data.train_on=all",
                )
            spans.append((len(before), len(after)))
        return spans

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Any, where: str, ask: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=ask,
                **self.variables,
            )
        except Exception as error:  # the template's own, Jinja's, and what Python says of its expressions
            problem = f"{where}: the chat template of {self.label} refuses the chat: {first_line(error)}"
            raise UserError(f"{problem}; correct such rows, or leave them out") from error
        return text, spans[0] if marks else []


def template_of(tokenizer: Tokenizer, train_on: str) -> Template:
    """Return the chat template of a tokenizer that has one."""
    assert tokenizer.chat_template
    return Template(tokenizer.chat_template, train_on, tokenizer.label, tokenizer.roles)


@dataclass(frozen=True)
class Chats:
    """Rows of a dataset that are chats, which can be read again and again: all of a split, or some."""

    dataset: Any
    """The split, of ``datasets``, with the columns of the chats alone."""
    where: str
    """What it is, for messages."""
    source: Any
    """JSON that changes whenever the dataset does."""
    rows: np.ndarray
    """Numbers of the selected rows, int64."""
    origin: str = ""
    """What they are a part of, for the start block."""

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected rows do."""
        return [self.source, hashlib.sha256(self.rows.tobytes()).hexdigest()]

    def __iter__(self) -> Iterator[list[tuple[list[dict[str, Any]], Any, str]]]:
        """Yield some rows at a time: their messages, their tools, and where they are.

        Raises:
            UserError: a row is no chat.
        """
        names, number = self.dataset.column_names, 0
        for batch in self.dataset.select(self.rows).iter(_AT_ONCE):
            some = []
            for values in zip(*(batch[name] for name in names), strict=True):
                row, where = dict(zip(names, values, strict=True)), f"{self.where}, row {self.rows[number]}"
                tools = row.pop("tools", None)
                tools = without_none(_parsed(tools or None, "tools", where))
                some.append((messages_of(row, where), tools, where))
                number += 1
            yield some


def split_rows(chats: Chats, fraction: float) -> tuple[Chats, Chats]:
    """Divide into training and validation, always in the same way, one row at least in each. Raises UserError."""
    count = len(chats.rows)
    if count < 2:
        raise UserError(f"{chats.where} has one row, and training and validation need one each; give more")
    order = np.random.default_rng(0).permutation(count)
    held = max(1, round(fraction * count))
    valid, train = np.sort(chats.rows[order[:held]]), np.sort(chats.rows[order[held:]])
    return replace(chats, rows=train), replace(chats, rows=valid, origin="whole rows")


def open_chats(
    cache: Path, title: str, parts: Mapping[str, Chats], choice: TokenizerChoice, train_on: str, packing: bool
) -> TokenData:
    """Tokenise chats, or open them from the cache.

    Args:
        cache: the cache's folder.
        title: of the dataset, for the start block.
        parts: ``train``, perhaps ``valid``, without which it is all of ``train``, and ``test``.
        choice: the tokenizer; one without a chat template gets ``CHATML``.
        train_on: see ``Template``.
        packing: see ``TokenData``.

    Raises:
        UserError: a row is no chat, or the template does not take it.
    """
    own = choice.known
    choice = replace(choice, known=own.for_chats() if own else None)
    how = [choice.identity(), choice.known.roles] if choice.known else choice.identity()
    template = choice.known.chat_template if choice.known else CHATML
    key = ["chats", *([name, part.identity] for name, part in parts.items()), how, template, train_on]
    folder = built(cache, "chats", key, lambda folder: _build(folder, parts, choice, train_on))
    tokenizer, meta = choice.opened(folder).for_chats(), read_json(folder / "meta.json")
    warn_of_unknown(meta["unknown"])
    if meta["special"]:
        log.warning(
            "%s of chats have a special token in a message, such as <|im_end|>: it becomes the token, not its text",
            counted(meta["special"], "row"),
        )
    written = "its chat template"
    if not (own and own.chat_template):
        written = "written in ChatML, as this tokenizer has no chat template"
        log.warning(
            "the tokenizer has no chat template: chats are written in ChatML, and %s ends a text", CHATML_TOKENS[1]
        )
    ids = {name: np.memmap(folder / f"{name}.bin", dtype=meta["dtype"], mode="r") for name in parts}
    samples = {
        name: Samples(
            np.load(folder / f"{name}.starts.npy", mmap_mode="r"),
            np.memmap(folder / f"{name}.targets", dtype=np.bool_, mode="r"),
        )
        for name in parts
    }
    counts = f"{len(parts['train'].rows):,} chats of {quantity(len(ids['train']))} tokens"
    if "valid" in parts:
        counts += f" and {len(parts['valid'].rows):,} for validation ({parts['valid'].origin})"
    if "test" in parts:
        counts += f" and {len(parts['test'].rows):,} for testing"
    names = parts["train"].dataset.column_names
    by = "by its generation marks" if template_of(tokenizer, train_on).marked else "turn by turn"
    targets = f"the assistant's tokens are targets ({by}), {meta['targets']:.0%} of all"
    targets = targets if train_on == "assistant" else "every token is a target (data.train_on=all)"
    columns = f"column{'s' * (len(names) > 1)} {', '.join(names)}"
    description = f"{title}: {counts}, {columns}, {tokenizer.label}, {written}, {targets}"
    valid = "valid" if "valid" in parts else "train"
    return TokenData(
        ids["train"],
        ids[valid],
        tokenizer,
        description,
        ids.get("test"),
        samples={"valid": samples[valid], **samples},
        packing=packing,
        question=meta["question"],
        added=tokenizer.vocab_size - own.vocab_size if own else 0,
    )


def _build(folder: Path, parts: Mapping[str, Chats], choice: TokenizerChoice, train_on: str) -> None:
    """Write the ids of each part, one sample after the other, where they begin, and which of them are targets."""
    with completed(folder) as partial:
        read = [parts["train"]] if choice.name == OWN_BPE else parts.values()
        tokenizer = choice.made(_texts(read), partial).for_chats()
        counts = Counter[str]()
        for name, chats in parts.items():
            tokenizing = work(f"tokenizing the {name} chats", len(chats.rows), "rows")
            lengths = array("q", [0])
            ids_file, targets_file = partial / f"{name}.bin", partial / f"{name}.targets"
            with ids_file.open("wb") as file, targets_file.open("wb") as marks, tokenizing as advance:
                for ids, targets, sizes in _encoded(chats, tokenizer, train_on, counts):
                    ids.astype(tokenizer.dtype).tofile(file)
                    targets.tofile(marks)
                    lengths.extend(sizes)
                    advance(len(lengths) - 1)
            np.save(partial / f"{name}.starts.npy", np.cumsum(lengths, dtype=np.int64))
        shares = {name: counts[name] / counts["tokens"] for name in ("unknown", "targets")}
        asked = _question(parts["valid" if "valid" in parts else "train"])
        meta = {"dtype": tokenizer.dtype.name, "special": counts["special"], "question": asked}
        write_json(partial / "meta.json", meta | shares)


def _encoded(
    chats: Chats, tokenizer: Tokenizer, train_on: str, counts: Counter[str]
) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
    """Yield of some rows at a time the ids, which of them are targets, and how many each row has; and count them."""
    template = template_of(tokenizer, train_on)
    special = re.compile("|".join(map(re.escape, tokenizer.added_tokens())) or "(?!)")
    for some in chats:
        rendered = [template.render(*row) for row in some]
        try:
            encoded = list(tokenizer.encode_with_places([text for text, _ in rendered]))
        except Exception as error:  # of the library, for a character that the vocabulary lacks
            problem = f"{some[0][2]} or one of the {_AT_ONCE} from there on: {tokenizer.label} cannot encode it"
            remedy = "leave such rows out, or train a new model with data.tokenizer=bytes"
            raise UserError(f"{problem} ({first_line(error)}); {remedy}") from error
        ids = np.concatenate([ids for ids, _ in encoded])
        targets = np.concatenate([_targets(at, spans) for (_, at), (_, spans) in zip(encoded, rendered, strict=True)])
        counts["tokens"] += len(ids)
        counts["targets"] += int(targets.sum())
        counts["unknown"] += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
        for messages, _, _ in some:
            counts["special"] += any(special.search(message.get("content", "")) for message in messages)
        yield ids, targets, [len(ids) for ids, _ in encoded]


def _question(chats: Chats) -> str:
    """Return the beginning of a user's message, one of the first, to be asked again; empty: there is none."""
    messages = (message for chat, _, _ in next(iter(chats)) for message in chat)
    asked = (" ".join(message["content"].split()) for message in messages if message["role"] == "user")
    return next((text[:_SHOWN].strip() for text in asked if text), "")


def _targets(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return which tokens are targets, bool: those of which a character lies in a span, but for the first of all.

    So is one across the border of a span; a token without a character counts where the next one does.
    """
    first, end = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
    mask = np.zeros(len(places), dtype=bool)
    for begin, stop in spans:
        mask |= (first < stop) & (end > begin)
    mask[:1] = False  # nothing comes before it
    return mask


def _texts(parts: Iterable[Chats]) -> Iterator[str]:
    """Yield the text of chats, without the special tokens, of which a tokenizer is made."""
    template = Template(CHATML, "all")
    ends = re.compile("|".join(map(re.escape, CHATML_TOKENS)))
    for chats in parts:
        for some in chats:
            for row in some:
                yield from filter(None, ends.split(template.render(*row)[0]))
