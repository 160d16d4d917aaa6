"""Files of token ids: each form is read to the token, and what is none is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from recipes.data.hub import Hub
from recipes.data.text import shards
from recipes.data.text.corpus import TextFiles
from recipes.data.text.shards import TokenFile, TokenFiles, TokenShards
from recipes.language import TokenWindows
from trainer.data.contract import SampleId
from trainer.errors import UserError

IDS = np.random.default_rng(0).integers(0, 300, 1000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that messages have short names."""
    (tmp_path / "ids").mkdir()
    monkeypatch.chdir(tmp_path / "ids")
    return tmp_path / "ids"


def raw(path: Path, ids: Any, dtype: str = "uint16") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids).astype(dtype).tofile(path)


def llm_c(path: Path, ids: Any, magic: int = 20240520, version: int = 1, dtype: str = "uint16", said: int = -1) -> None:
    """A file as llm.c's dev/data/data_common.py writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if said < 0 else said
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())


def rows(path: Path, column: Any, name: str = "input_ids") -> None:
    parquet.write_table(pa.table({name: column}), path, row_group_size=2)


LISTS = [IDS[:400].tolist(), [], None, IDS[400:950].tolist(), IDS[950:].tolist()]
FORMS: dict[str, Callable[[Path], None]] = {
    "raw.bin": lambda path: raw(path, IDS),
    "gpt2.bin": lambda path: llm_c(path, IDS),
    "llama3.bin": lambda path: llm_c(path, IDS, 20240801, 7, "uint32"),
    "int64.npy": lambda path: np.save(path, IDS),
    "big-endian.npy": lambda path: np.save(path, IDS.astype(">u2")),
    "lists.parquet": lambda path: rows(path, LISTS),
    "large.parquet": lambda path: rows(path, pa.array(LISTS, pa.large_list(pa.uint16()))),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same_ids(name: str, folder: Path) -> None:
    FORMS[name](folder / name)
    data = TokenShards(path=name).tokens(None)
    assert data.train[:].tolist() == IDS[:900].tolist()
    assert data.valid[:].tolist() == IDS[900:].tolist()
    assert data.tokenizer.vocab_size == IDS.max() + 1
    assert not data.text_bytes


def test_32_bits_without_a_header_are_read_where_they_are_said(folder: Path) -> None:
    raw(folder / "a.bin", IDS + 70_000, "uint32")
    data = TokenShards(path="a.bin", dtype="uint32").tokens(None)
    assert [*data.train[:], *data.valid[:]] == (IDS + 70_000).tolist()


def test_files_are_one_sequence_that_is_mapped_and_never_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_mapped", shards.lru_cache(2)(shards._mapped.__wrapped__))  # fewer than files
    lengths = [3, 1, 5, 2, 7]
    starts = np.cumsum([0, *lengths])
    files = []
    for number, length in enumerate(lengths):
        raw(folder / f"{number}.bin", IDS[starts[number] : starts[number + 1]])
        files.append(TokenFile.of(Path(f"{number}.bin"), "uint16", 0, length))
    for first, end in ((0, 18), (2, 13), (4, 5), (9, 18)):
        ids, expected = TokenFiles(files, first, end), IDS[first:end]
        for start in range(len(expected) + 1):
            for stop in range(start, len(expected) + 2):
                assert ids[start:stop].tolist() == expected[start:stop].tolist()
    assert isinstance(ids[0:2], np.memmap)
    raw(folder / "long.bin", np.tile(IDS, 1000))
    windows = TokenWindows(TokenFiles([TokenFile.of(Path("long.bin"), "uint16", 0, 10**6)]), 64)
    samples = [SampleId(15_000, None), SampleId(7, 5)]
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert pickle.loads(sent).batch(samples)["tokens"].equal(windows.batch(samples)["tokens"])


def test_the_words_in_the_names_say_what_files_are_for(folder: Path) -> None:
    names = {
        "fineweb_train_000001.bin": 1, "fineweb_train_000000.bin": 0, "fineweb_val_000000.bin": 2, "a-test.bin": 3,
        "trainable.bin": 4, "readme.md": 9, ".hidden.bin": 9,
    }  # fmt: skip
    for name, number in names.items():
        raw(folder / "ids" / name, [number, number + 10])

    def parts(path: str, **options: str) -> list[list[int] | None]:
        data = TokenShards(path=path, **options).tokens(None)
        return [None if part is None else part[:].tolist() for part in (data.train, data.valid, data.test)]

    assert parts("ids") == [[0, 10, 1, 11, 4, 14], [2, 12], [3, 13]]
    assert parts("ids", valid="ids/fineweb_val*", test="ids/.hidden.bin")[1:] == [[2, 12], [9, 19]]
    assert "(1 more left out" in TokenShards(path="ids", test="ids/.hidden.bin").tokens(None).description
    assert parts("ids/*train_*.bin") == [[0, 10, 1], [11], None]
    assert parts("ids/fineweb_val_000000.bin") == [[2], [12], None]  # a file that is named is for training
    for name in ("train/0.bin", "validation/0.bin"):
        raw(folder / "deep" / name, [1, 2])
    assert parts("deep/**/*.bin") == [[1, 2], [1, 2], None]


def test_the_ids_are_checked_once_and_a_changed_file_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_AT_ONCE", 64)
    raw(folder / "a.bin", IDS)
    assert TokenShards(path="a.bin", vocab_size=400).tokens(None).tokenizer.vocab_size == 400
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_range", Mock(side_effect=AssertionError))
        assert TokenShards(path="a.bin").tokens(None).tokenizer.vocab_size == IDS.max() + 1
    ids = IDS.copy()
    ids[[700, 900]] = 400, 500
    raw(folder / "a.bin", [*ids, 0])
    with pytest.raises(UserError, match=r"a\.bin: id number 700 is 400, and data\.vocab_size=400 has the ids 0 to 399"):
        TokenShards(path="a.bin", vocab_size=400).tokens(None)
    np.save("b.npy", np.array([*range(99), -100]))
    with pytest.raises(UserError, match=r"b\.npy: id number 99 is -100"):
        TokenShards(path="b.npy").tokens(None)


def test_a_tokenizer_gives_the_ids_their_text(folder: Path) -> None:
    raw(folder / "a.bin", list("naïve".encode() * 9))
    data = TokenShards(path="a.bin", tokenizer="bytes").tokens(None)
    assert data.tokenizer.decode(data.train[:6].tolist()) == "naïve"
    raw(folder / "a.bin", [255, 256])
    wrong = "id number 1 is 256, and 256 bytes has the ids 0 to 255"
    with pytest.raises(UserError, match=f"{wrong}; make them with this tokenizer, or train a new model"):
        TokenShards(path="a.bin").tokens("bytes")  # init_from's
    with pytest.raises(UserError, match=f"{wrong}; name what made them"):
        TokenShards(path="a.bin", tokenizer="bytes").tokens(None)


WRONG: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "empty": (lambda path: path.touch(), {}, "is empty"),
    "odd": (lambda path: path.write_bytes(bytes(101)), {}, "has 101 bytes, and ids of type uint16 take 2"),
    "short": (lambda path: llm_c(path, IDS, said=2000), {}, "is cut off: its header says 2,000 ids"),
    "long": (lambda path: llm_c(path, IDS, said=900), {}, "its header says 900 ids"),
    "none": (lambda path: llm_c(path, []), {}, "has no ids"),
    "version": (lambda path: llm_c(path, IDS, version=2), {}, "version 2; version 1 is read"),
    "questions": (lambda path: llm_c(path, IDS, 20240522), {}, "questions"),
    "32 bits": (lambda path: raw(path, IDS, "uint32"), {}, "each has 32 bits; set data.dtype=uint32"),
    "64 bits": (lambda path: raw(path, IDS, "int64"), {}, "each has 64 bits; write them anew"),
    "64 bits, 32 said": (lambda path: raw(path, IDS, "int64"), {"dtype": "uint32"}, "each has 64 bits"),
    "16 bits, 32 said": (lambda path: raw(path, IDS + 9), {"dtype": "uint32"}, "rather of another type"),
    "many ids": (lambda path: raw(path, IDS), {"vocab_size": 70_000}, "70,000 token ids take 32 bits"),
    "said twice": (lambda path: llm_c(path, IDS), {"dtype": "uint32"}, "says that it has uint16"),
    "no ids.npy": (lambda path: np.save(path, IDS / 2), {}, "has float64"),
    "rows.npy": (lambda path: np.save(path, IDS.reshape(10, 100)), {}, "the shape 10 × 100"),
    "objects.npy": (lambda path: np.save(path, np.array([{}])), {}, "no array that opens"),
    "cut.npy": (lambda path: (np.save(path, IDS), path.write_bytes(path.read_bytes()[:-8])), {}, "no array that opens"),
    "text.parquet": (lambda path: rows(path, ["a b"], "text"), {}, "its columns are text; set data=hub data.name="),
    "words.parquet": (lambda path: rows(path, [["a"]]), {}, "a list of whole numbers"),
    "null.parquet": (lambda path: rows(path, [[1, None]]), {}, "some are null"),
    "negative.parquet": (lambda path: rows(path, [[1, 2]] * 3000 + [[-1]]), {}, "row 2,048 on"),
    "no.parquet": (lambda path: path.write_text("text"), {}, "no parquet file that opens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_holds_no_ids_is_named(case: str, folder: Path, cache: Path) -> None:
    write, options, words = WRONG[case]
    name = case if case.endswith(("npy", "parquet")) else "a.bin"
    write(folder / name)
    with pytest.raises(UserError) as refused:
        TokenShards(path=name, **options).tokens(None)
    assert name in str(refused.value) or "data.dtype" in str(refused.value)
    assert words in str(refused.value)
    assert not list(cache.rglob("*.bin"))


FOLDERS = {
    "types": (["a.bin", "b.npy"], "has uint16", {}),
    "nothing": (["a.txt"], r"no file of token ids .* \(it has a\.txt\)", {}),
    "below": (["sub/a.bin"], r"\(it has sub\); set .*\*\*/\*\.bin", {}),
    "no training": (["a_val.bin", "b_val.bin"], "no file is for training", {}),
    "two words": (["train_val.bin", "b.bin"], "named for train and valid", {}),
    "validation": (["a.bin"], "is training data, too; set data.valid to", {"valid": "here/a.bin"}),
    "test": (["train.bin", "val.bin"], "is validation data, too; set data.test to", {"test": "here/val.bin"}),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_a_folder_lacks_is_said(case: str, folder: Path) -> None:
    names, words, options = FOLDERS[case]
    for name in names:
        np.save(folder / "here" / name, IDS) if name.endswith("npy") else raw(folder / "here" / name, IDS)
    with pytest.raises(UserError, match=words):
        TokenShards(path="here", **options).tokens(None)


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_data_of_text_sends_files_of_ids_here(name: str, folder: Path) -> None:
    raw(folder / name, IDS)
    for path in (name, "."):
        with pytest.raises(UserError) as refused:
            TextFiles(path=path).tokens(None)
        assert refused.value.remedies == (f"data=tokens data.path={path}",)


def test_data_of_a_hub_sends_input_ids_here(folder: Path) -> None:
    rows(folder / "a.parquet", LISTS)
    with pytest.raises(UserError, match=r"input_ids \(.*; input_ids are token ids, which data=tokens reads"):
        Hub(name="a.parquet").tokens(None)
