from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.data.hub import Hub
from recipes.data.text import cache as cache_store
from recipes.data.text import tokens as token_store
from recipes.data.text.corpus import PythonDocs, TextFiles
from recipes.data.text.documents import Text, split
from recipes.data.text.pretrained import Pretrained
from recipes.data.text.tokenizers import BytePairs, Bytes, numbers
from recipes.data.text.tokens import TextDatasets, TokenData, Windows
from recipes.language import TokenWindows
from tests.hub import ask_at
from trainer.errors import UserError

LINES = [f"def function_{i}(x):\n    return x * {i * i}  # naïve, 日本\n\n\n" for i in range(400)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for i in range(60):
        place = root / f"part{i % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.txt").write_text(f"document {i} " + "word " * 20, encoding="utf-8")
    return root


def decoded(data: TokenData) -> tuple[str, str]:
    return data.tokenizer.decode(data.train.tolist()), data.tokenizer.decode(data.valid.tolist())


def test_tinyshakespeare_in_characters_is_nanogpts(shared_data: Path) -> None:
    data = TextFiles(path=str(shared_data / "tinyshakespeare.txt"), tokenizer="chars").tokens(None)
    assert (len(data.train), len(data.valid), data.tokenizer.vocab_size) == (1_003_854, 111_540, 65)


@pytest.mark.parametrize(("ids", "count"), [(12, 2), (13, 3), (16, 3), (17, 4)])
def test_windows_are_as_many_as_the_ids_and_the_one_after_them_fill(ids: int, count: int) -> None:
    windows = Windows(np.arange(ids), 4, more=1)
    assert len(windows) == count
    cut = [windows.cut(index, None).tolist() for index in range(count)]
    assert cut == [list(range(4 * index, 4 * index + 5)) for index in range(count)]
    for index in range(count):  # training moves a window by the sample's seed, as far as there is text
        first = min(4 * index + 3, ids - 5)
        assert windows.cut(index, 7).tolist() == list(range(first, first + 5))


@pytest.mark.parametrize("tokenizer", ["bpe", "chars", "bytes"])
def test_one_file_is_cut_at_nine_tenths_and_nothing_is_lost(file: Path, tokenizer: str) -> None:
    text = "".join(LINES)
    data = TextFiles(path=str(file), tokenizer=tokenizer, vocab_size=500).tokens(None)
    if tokenizer == "bytes":  # the cut may fall within a character of UTF-8 for ids, but not for text
        assert data.train.tolist() == list(text[: int(len(text) * 0.9)].encode())
    assert decoded(data) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])
    assert data.train.dtype == np.uint16
    assert isinstance(data.train, np.memmap)
    assert max(data.train.max(), data.valid.max()) < data.tokenizer.vocab_size
    assert data.tokenizer.decode([10**6, *data.tokenizer.encode("x")]) == "x"


def test_many_files_are_split_whole_with_a_mark_between_them(folder: Path) -> None:
    data = TextFiles(path=str(folder), tokenizer="bpe", vocab_size=300).tokens(None)
    train, valid = (text.split("<|endoftext|>") for text in decoded(data))
    everything = {path.read_text() for path in folder.rglob("*.txt")}
    assert sorted(train + valid) == sorted(everything)
    assert 3 <= len(valid) <= 6


def test_a_file_as_large_as_the_validation_part_stays_in_training() -> None:
    sizes, first = np.full(61, 10), np.random.default_rng(0).permutation(61)[0]  # which is drawn before the others
    sizes[first] = 60
    train, valid = split(Text(sizes, lambda rows: ([str(row)] for row in rows), "sizes", range(61)), 0.1)
    assert [str(first)] in list(train)
    assert len(list(valid)) == 6


@pytest.mark.parametrize("largest", [2, 40, 3000])
def test_documents_are_set_aside_in_random_order_as_they_fit(largest: int) -> None:
    sizes = np.random.default_rng(largest).integers(0, largest, 2000)
    wanted, chosen, filled = 0.1 * sizes.sum(), set(), 0
    for row in np.random.default_rng(0).permutation(len(sizes)).tolist():
        if sizes[row] <= wanted / 4 and filled + sizes[row] <= wanted:
            chosen.add(row)
            filled += sizes[row]
    train, valid = split(Text(sizes, lambda rows: iter([]), "sizes", range(len(sizes))), 0.1)
    assert isinstance(train.rows, np.ndarray)  # of which tens of millions fit into memory
    assert isinstance(valid.rows, np.ndarray)
    assert valid.rows.tolist() == sorted(chosen)
    assert train.rows.tolist() == sorted(set(range(len(sizes))) - chosen)


def test_a_divided_document_is_measured_once() -> None:
    read = []

    def document() -> Iterator[str]:
        read.append("once")
        yield "0123456789"

    class Document:
        __iter__ = staticmethod(document)

    train, valid = split(Text(np.array([10]), lambda rows: iter([Document()]), "one", range(1)), 0.1)
    assert ["".join(lines) for part in (train, train, valid) for lines in part] == ["012345678", "012345678", "9"]
    assert len(read) == 4


def test_a_few_files_each_give_their_end(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.md").write_text("never")
    data = TextFiles(path=str(tmp_path), tokenizer="bytes", valid_fraction=0.2).tokens(None)
    assert decoded(data) == ("a" * 8 + "\n" + "b" * 8 + "\n" + "c" * 8, "aa\nbb\ncc")


def test_bpe_learns_from_the_training_part_only(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("apple pear " * 450 + "zzzzzz qqqqqq " * 30)
    vocabulary = TextFiles(path=str(path), vocab_size=400).tokens(None).tokenizer
    assert len(vocabulary.encode(" pear")) == 1
    assert len(vocabulary.encode(" zzzzzz")) > 1


@pytest.mark.parametrize(
    ("limit", "value", "texts", "read"),
    [
        ("_BPE_TRAINING_CHARACTERS", 25, ["many words "] * 9, 3),
        ("_BPE_TRAINING_WORDS", 25, ["many words "] * 9, 9),  # as prose, whose words come again
        ("_BPE_TRAINING_WORDS", 25, [chr(0x4E00 + i) * 4 for i in range(9)], 3),  # 12 bytes, each a word of its own
    ],
)
def test_a_bpe_is_trained_on_as_much_text_as_memory_allows(
    limit: str, value: int, texts: list[str], read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"recipes.data.text.tokenizers.{limit}", value)
    left = iter(texts)
    BytePairs.train(left, 300)
    assert len(texts) - len(list(left)) - (read < len(texts)) == read  # one more is looked at, but not taken


def test_pieces_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "".join(LINES)
        + "a  \n\nb\n  c\n" * 50
        + "line\r\nline \r\n" * 50
        + "a\n\n\n b\n" * 50
        + "a\n \n\n" * 50
        + " = A = \n A b . \n" * 50
        + "<|endoftext|>\nnew\n" * 9
        + "one line,  of  words 15 \t(and more )" * 50
        + "z\n "
    )
    bpe = BytePairs.train([text], 500)
    monkeypatch.setattr(token_store, "_PIECE", 10)
    monkeypatch.setattr(token_store, "_CHARACTERS_AT_ONCE", 100)
    lines = ["", *text.splitlines(keepends=True)]
    pieces = list(token_store.pieces(lines))
    assert len(pieces) > 200
    assert max(piece.count("of  words") for piece in pieces) == 1
    assert "".join(pieces) == text
    encoded = list(token_store.encoded([lines, [""], lines], bpe))
    ids = np.concatenate([ids for ids, _ in encoded]).tolist()
    assert ids == bpe.encode(text) + bpe.separator + bpe.encode(text)
    assert sum(size for _, size in encoded) == 2 * len(text.replace("<|endoftext|>", "").encode())


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    line = "a line of text.\n" * 64
    path = tmp_path / "large.txt"
    path.write_text(line * 2**11)
    (document,) = TextFiles(path=str(path)).splits()[0].read([0])
    tracemalloc.start()
    characters = sum(len(piece) for piece in token_store.pieces(document))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == len(line) * 2**11  # 2 M
    assert peak < 1e6


def test_the_text_of_unknown_words_is_text_and_nothing_is_cut_off_or_padded(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "known": 1, "[SEP]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]").save_pretrained(tmp_path)
    opened = Pretrained.open(str(tmp_path), "data.tokenizer")
    ((ids, size),) = token_store.encoded([["known strange [SEP] [UNK] other"]], opened)
    assert ids.tolist() == [1, 0, 2, 0, 0]
    assert size == len("known strange   other")


def test_a_tokenizer_that_does_not_know_the_text_is_said(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "known": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    file.write_text("known strange known known\n" * 40)
    (tmp_path / "rows.jsonl").write_text('{"text": "known strange known known"}\n' * 40)
    tokenizer = str(tmp_path / "tokenizer")
    streamed = Hub(name=str(tmp_path / "rows.jsonl"), tokenizer=tokenizer, max_tokens=1e9)
    for source in [TextFiles(path=str(file), tokenizer=tokenizer), streamed] * 2:  # when it is made, and from the cache
        caplog.clear()
        source.tokens(None)
        assert "25 % of the tokens are of text that the tokenizer does not know" in caplog.text


def test_gpt2s_tokenizer_from_a_folder(shared_data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source, place = tmp_path / "some.txt", shared_data / "gpt2-tokenizer"
    source.write_text((shared_data / "tinyshakespeare.txt").read_text()[:20_000])
    data = TextFiles(path=str(source), tokenizer=str(place)).tokens(None)
    text = source.read_text()
    expected = AutoTokenizer.from_pretrained(place)(text[: int(len(text) * 0.9)], verbose=False)["input_ids"]
    assert data.train.tolist() == expected
    assert data.tokenizer.vocab_size == 50257
    override = TextFiles(path=str(source), tokenizer="chars").tokens(str(place))
    assert override.tokenizer.vocab_size == 50257


def test_a_large_vocabulary_takes_32_bits(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("".join(map(chr, range(0x10000, 0x10000 + 70_000))), encoding="utf-8-sig")
    data = TextFiles(path=str(path), tokenizer="chars").tokens(None)  # the byte order mark is no character
    assert data.train.dtype == np.uint32
    assert data.valid.max() == 70_000


def test_python_docs_is_this_interpreters_library() -> None:
    train, valid = PythonDocs().splits()
    names = [document.path for document in train.read(range(len(train.sizes)))]
    assert {"argparse.py", "heapq.py", "decoder.py"} <= {path.name for path in names}
    assert not any({"site-packages", "test"} & set(path.parts) for path in names)
    assert set(train.rows).isdisjoint(valid.rows)
    assert 0.05 < valid.megabytes / (train.megabytes + valid.megabytes) <= 0.1
    data = PythonDocs(tokenizer="bytes").tokens(None)
    assert len(data.train) > 4e6
    assert data.description.startswith("python_docs: ")


# --- the cache


def test_the_second_time_nothing_is_read_and_what_matters_makes_another_entry(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TextFiles(path=str(file), vocab_size=300).tokens(None)
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_build", None)
        second = TextFiles(path=str(file), vocab_size=300).tokens(None)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.valid, second.valid)
    for change in ({"vocab_size": 301}, {"tokenizer": "chars"}, {"valid_fraction": 0.3}):
        TextFiles(**{"path": str(file), "vocab_size": 300} | change).tokens(None)
    assert len([entry for entry in (cache / "text").iterdir() if entry.is_dir()]) == 4


def test_a_killed_preparation_leaves_nothing_that_looks_finished(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TextFiles(path=str(file), vocab_size=300)
    with monkeypatch.context() as patch:
        patch.setattr(cache_store, "flush", Mock(side_effect=KeyboardInterrupt))  # everything is written
        patch.setattr("shutil.rmtree", Mock())  # a kill cleans nothing
        with pytest.raises(KeyboardInterrupt):
            source.tokens(None)
    assert [entry.name for entry in (cache / "text").iterdir() if not entry.name.startswith(".")] == []
    assert "".join(decoded(source.tokens(None))) == "".join(LINES)
    assert not list((cache / "text").glob("*.partial"))


# --- user errors


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty, or blank"),
        (b" \n\n\t\r\n" * 50, "is empty, or blank"),
        (b"\xef\xbb\xbf", "is empty, or blank"),
        (b"a", "the train part"),
        (b"fine\nuntil\x00here", "line 2 has a zero byte"),
        (b"PK\x03\x04\x14\0\x06\0word/document.xml", "line 1 has a zero byte"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "line 2 has the byte 0xe2 at offset 10"),
        (b"fine\ncut \xc3", "line 2 has the byte 0xc3 at offset 9"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, cache: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=words):
        TextFiles(path=str(tmp_path / "bad.txt")).tokens(None)
    assert not list(cache.rglob("*.bin"))


@pytest.mark.parametrize(
    ("encoding", "mark", "wrong", "ending", "lines"),
    [
        ("utf-8", "", b"\x92", "\n", 3),
        ("utf-8", "\ufeff", b"\x92", "\r\n", 30_000),  # in a later piece that is read
        ("ascii", "", b"\x92", "\r\n", 3),
        ("gb18030", "", b"\xff", "\n", 30_000),
    ],
)
def test_the_line_and_the_offset_of_a_wrong_byte(
    encoding: str, mark: str, wrong: bytes, ending: str, lines: int, tmp_path: Path
) -> None:
    name = "plain" if encoding == "ascii" else "日本"
    before = f"{mark}{f'a line, {name}{ending}' * lines}and it".encode(encoding)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(before + wrong + b"s here\n" * 3000)
    where = f"line {lines + 1:,} has the byte 0x{wrong[0]:02x} at offset {len(before):,};"
    with pytest.raises(UserError, match=where):
        TextFiles(path=str(tmp_path), tokenizer="bytes", encoding=encoding).tokens(None)


LETTERS = "Über die Äpfel, süß wie Öl.\n" * 99


@pytest.mark.parametrize("written", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le"])
def test_text_is_read_in_the_encoding_that_is_set(written: str, tmp_path: Path) -> None:
    """Of utf-8, whatever its name, a byte order mark is no text; any other encoding has to be set."""
    path = tmp_path / "a.txt"
    path.write_bytes(LETTERS.encode(written))
    if not written.startswith("utf-8"):
        with pytest.raises(UserError, match=r"data\.encoding="):
            TextFiles(path=str(path), tokenizer="chars").tokens(None)
    encoding = "UTF8" if written == "utf-8-sig" else written
    data = TextFiles(path=str(path), tokenizer="chars", encoding=encoding).tokens(None)
    assert "".join(decoded(data)) == LETTERS


def test_a_folder_without_matching_files_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(UserError, match=r"data.pattern=\*.txt \(it has \*.md\)"):
        TextFiles(path=str(tmp_path)).tokens(None)


def test_a_pattern_finds_names_in_capitals_and_in_folders(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "old").mkdir(parents=True)
    for name in ("a.txt", "B.TXT", "old/c.Txt", "d.md"):
        (texts / name).write_text("x" * 9)
    found = {"*.txt": 27, "old/*.txt": 9, "**/*.txt": 27, "?.TXT": 27, "[ab].txt": 18, "*": 36, "**.md": 9}
    for pattern, size in found.items():
        data = TextFiles(path=str(texts), pattern=pattern, tokenizer="bytes").tokens(None)
        assert sum(data.text_bytes.values()) == size, pattern


def test_a_disk_that_fills_up_while_text_is_tokenized(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("a line\n" * 9000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # Python ignores the signal
    try:
        with pytest.raises(UserError, match="free disk space"):
            TextFiles(path=str(tmp_path / "big.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")).tokens(None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- tokenizers of the hub, without a network


def test_a_hub_tokenizer_while_offline(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_at("http://127.0.0.1:9", monkeypatch)
    for name, override in (("data.tokenizer", None), ("init_from", "nobody/nothing")):
        with pytest.raises(UserError, match=f"{name}=nobody/nothing"):
            TextFiles(path=str(file), tokenizer="bpe" if override else "nobody/nothing").tokens(override)
    for name in ("./nowhere", "/no/such/tokenizer", "a/b/c"):
        with pytest.raises(UserError, match=f"data.tokenizer={name}"):
            TextFiles(path=str(file), tokenizer=name).tokens(None)
    (tmp_path / "smol").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data.tokenizer=smoll: there is no such file or folder here.*mean 'smol'"):
        TextFiles(path=str(file), tokenizer="smoll").tokens(None)


def test_a_prompt_ends_where_a_document_does() -> None:
    texts = ["So we are. Yes, indeed.", "Resolved."]
    tokenizer = BytePairs.train(iter(texts * 9), 300)
    ids = np.array([id for text in texts * 9 for id in (*tokenizer.encode(text), *tokenizer.separator)])
    data = TokenData(ids, ids, tokenizer, "")
    part = TokenWindows(ids, 4)
    datasets = TextDatasets(part, part, "", tokens=data, tokenizer=tokenizer, vocabulary=300)
    assert datasets.first_words == "Resolved."


def test_a_prompt_of_numbers_has_whole_ones() -> None:
    ids = np.arange(100_000, 100_020)
    data = TokenData(ids, ids, numbers(100_020), "")
    part = TokenWindows(ids, 4)
    datasets = TextDatasets(part, part, "", tokens=data, tokenizer=data.tokenizer, vocabulary=100_020)
    assert data.tokenizer.encode(datasets.first_words) == [*ids[:3]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("d me.\n\n  The first words are a prompt.\nMore.\n", "The first words"),
        ("def f(x):\n", "def f(x):"),
        ("Öl\n\n", "Öl"),
        ("a" * 99, "a" * 30),
        ("\n", ""),
    ],
)
def test_a_prompt_begins_as_the_text_does(text: str, words: str) -> None:
    tokens = np.frombuffer(text.encode(), np.uint8)
    data = TokenData(tokens, tokens, Bytes(), "")
    part = TokenWindows(np.zeros(9, np.uint8), 4)
    datasets = TextDatasets(part, part, "", tokens=data, tokenizer=data.tokenizer, vocabulary=256)
    assert datasets.first_words == words
