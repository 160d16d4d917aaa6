"""``data=tokens``: token ids that another program wrote, read where they lie, through memory maps."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from mantissa.display import counted, shortened
from recipes.data.text.cache import building, digest
from recipes.data.text.files import PART_OF, missing, typed
from recipes.data.text.pretrained import open_tokenizer
from recipes.data.text.tokenizers import Tokenizer, numbers
from recipes.data.text.tokens import TextSource, TokenData, amounts
from trainer.cache import cache_folder, cached
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_choice, check_number, check_range, no_effect
from trainer.files import flush
from trainer.terminal import work

ENDINGS = (".bin", ".npy", ".parquet")
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""The first number of llm.c's files of ids, their version, and the type of the ids (dev/data/data_common.py there)."""
_EVALUATIONS = 20240522
"""The first number of llm.c's files of questions, such as HellaSwag's."""
_HEADER_BYTES = 256 * 4
_TRIED = 10**6
_AT_ONCE = 2**24
"""Ids that are checked at once."""
_OPEN = 256
"""Files that are mapped at once: each takes a file descriptor, of which a process often has 1,024."""
_MOST_NUMBERS = 2**20
"""Most ids of a vocabulary that no option names; more are rather ids that were read in the wrong type."""


class TokenFile(NamedTuple):
    """Ids in a file, one after the other."""

    path: str
    dtype: str
    """Numpy's name of their type."""
    offset: int
    """Bytes before the first."""
    length: int
    """Number of ids."""
    changed: int
    """When it was written, in nanoseconds: another file of this name is another one."""

    @classmethod
    def of(cls, path: Path, dtype: str, offset: int, length: int) -> Self:
        """Return what a file is read as."""
        return cls(str(path.absolute()), dtype, offset, length, path.stat().st_mtime_ns)


@lru_cache(_OPEN)
def _mapped(file: TokenFile) -> np.ndarray:
    return np.memmap(file.path, file.dtype, "r", file.offset, (file.length,))


class TokenFiles:
    """Files of ids that are read as one array. What is pickled, for loading processes, is where they are.

    Args:
        files: at least one, of the same type.
        first, end: the ids that are taken, of all files together; ``end`` None: to the last.
    """

    def __init__(self, files: Sequence[TokenFile], first: int = 0, end: int | None = None) -> None:
        self.files = list(files)
        self._starts = np.cumsum([0, *(file.length for file in files)])
        self._first, self._end = first, int(self._starts[-1]) if end is None else end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return consecutive ids, in the files' own type."""
        start, end, _ = part.indices(len(self))
        start, end = start + self._first, end + self._first
        row = int(np.searchsorted(self._starts, start, "right")) - 1
        arrays = [np.empty(0, self.files[0].dtype)]
        while start < end:
            before, after = int(self._starts[row]), int(self._starts[row + 1])
            arrays.append(_mapped(self.files[row])[start - before : end - before])
            start, row = after, row + 1
        return arrays[1] if len(arrays) == 2 else np.concatenate(arrays)


@dataclass
class TokenShards(TextSource):
    """Token ids: nanoGPT's and llm.c's ``.bin``, ``.npy``, or parquet with ``input_ids``."""

    kind: ClassVar[str] = "tokens"
    path: str = ""
    """File of token ids (.bin, .npy, parquet with input_ids), a folder of them, or a glob pattern. Of several files, a
    word in the name says what a file is for: train, val, valid, validation or test; without one it is for training."""
    valid: str | None = None
    """Ids for validation: another file, folder or pattern; null: those files of ``path``, else a part of it."""
    test: str | None = None
    """Ids for testing, evaluated once, at the end, with the best weights: another file, folder or pattern; null: those
    files of ``path``."""
    valid_fraction: float = 0.1
    """Fraction of the ids held out for validation, from the end, where no file is for it."""
    tokenizer: str | None = None
    """What made the ids: bytes, or a hub id or folder that AutoTokenizer opens; null: they are shown as numbers."""
    vocab_size: int | None = None
    """Number of token ids, without a tokenizer; null: the largest id in the files, plus 1."""
    dtype: str = "auto"
    """Type of the ids in a .bin without a header, and of those that parquet is converted to: uint16 or uint32; auto:
    uint16, for parquet uint32."""
    cache_dir: str | None = None
    """Where parquet is converted to; null: the environment variable ``MANTISSA_CACHE``, else ``~/.cache/mantissa``."""

    def __post_init__(self) -> None:
        check_choice("data.dtype", self.dtype, ("auto", "uint16", "uint32"))
        check_number("data.vocab_size", self.vocab_size, 2)
        check_range("data.valid_fraction", self.valid_fraction, "(0, 0.5]")
        if not self.path:
            raise UserError(
                "missing required option: data.path; set a file of token ids (.bin, .npy or .parquet), a folder of "
                "them or a pattern, such as data.path='shards/*.bin'"
            )
        if self.tokenizer is not None and self.vocab_size is not None:
            raise no_effect(f"data.vocab_size={self.vocab_size}", "data.tokenizer has its own")

    def tokens(self, tokenizer: str | None) -> TokenData:
        known = None
        if name := tokenizer or self.tokenizer:
            known = open_tokenizer(name, f"data.tokenizer={name}" if tokenizer is None else f"init_from={name}")
        vocabulary = known.vocab_size if known else self.vocab_size
        # Open the files of each part. ``where`` is the option that named one, for messages, with the file's name.
        files: dict[str, list[TokenFile]] = {"train": [], "valid": [], "test": []}
        opened = []
        found, left_out = self._found()
        for part, entries in found.items():
            for where, path in entries:
                files[part].append(self._opened(where, path, vocabulary))
                opened.append((where, files[part][-1]))
        (where, first), *others = opened
        for other, file in others:
            if file.dtype != first.dtype:
                both = f"{where} has {first.dtype}, {other} has {file.dtype}"
                raise UserError(f"{both}; one run reads ids of one type: write them anew in it")
        # Check every id, which is done once.
        remedy = "name what made them"
        if tokenizer is not None:
            remedy = "make them with this tokenizer, or train a new model: data.tokenizer without init_from"
        largest = self._check(opened, known, vocabulary, remedy)
        if known is None:
            known = numbers(vocabulary or largest + 1)
            size = vocabulary or "null: the largest plus 1"
            what = f"{known.vocab_size:,} ids without a tokenizer (data.vocab_size={size})"
        else:
            what = known.label
        # Cut off what is held out.
        train = TokenFiles(files["train"])
        cut = len(train)
        if not files["valid"]:
            cut = int(len(train) * (1 - self.valid_fraction))
            valid, origin = TokenFiles(files["train"], cut), f"the last {self.valid_fraction:.3g}"
        else:
            valid, origin = TokenFiles(files["valid"]), _names(files["valid"])
        parts = {"train": TokenFiles(files["train"], 0, cut), "valid": valid}
        if files["test"]:
            parts["test"] = TokenFiles(files["test"])
        about = amounts(parts, origin) + (f" ({_names(files['test'])})" if files["test"] else "")
        about += f", {first.dtype} in {counted(len(opened), 'file')}"
        about += f" ({left_out} more left out, for data.valid and data.test)" if left_out else ""
        description = f"{Path(self.path).name}: {about}, {what}"
        return TokenData(parts["train"], valid, known, description, parts.get("test"))

    def _found(self) -> tuple[dict[str, list[tuple[str, Path]]], int]:
        """Return the files of each part, and where each is, for messages; and how many of ``path`` have no part.

        Raises:
            UserError: there are none to train on, one has two parts, or training files are named for another part, too.
        """
        parts: dict[str, list[tuple[str, Path]]] = {"train": [], "valid": [], "test": []}
        key = f"data.path={self.path}"
        root, paths = _paths(key, self.path)
        for path in paths:
            words = re.split(r"[^a-z0-9]+", str(path.relative_to(root)).lower()) if len(paths) > 1 else []
            of = {PART_OF[word] for word in words if word in PART_OF} or {"train"}
            if len(of) > 1:
                raise UserError(f"{key}: {path.name} is named for {' and '.join(sorted(of))}; rename it")
            parts[of.pop()].append((key if path == Path(self.path).expanduser() else f"{key}: {path.name}", path))
        if not parts["train"]:
            names = shortened([path.name for path in paths], 3)
            raise UserError(f"{key}: by their names no file is for training ({names}); name one of them")
        left_out = 0
        for part, given in (("valid", self.valid), ("test", self.test)):
            if given is not None:
                key = f"data.{part}={given}"
                named, parts[part] = parts[part], [(f"{key}: {path.name}", path) for path in _paths(key, given)[1]]
                left_out += len({path for _, path in named} - {path for _, path in parts[part]})
                for other, role in (("train", "training"), ("valid", "validation")):
                    if other != part:
                        files, others = ([str(path) for _, path in parts[name]] for name in (part, other))
                        check_no_overlap(key, files, others, role)
        return parts, left_out

    def _opened(self, where: str, path: Path, vocabulary: int | None) -> TokenFile:
        """Return where the ids of a file are.

        Raises:
            UserError: it holds no ids, or in a form that is not read.
        """
        if not path.stat().st_size:
            raise UserError(f"{where} is empty; fetch or write it again")
        if path.suffix.lower() == ".parquet":
            return self._flat(where, path)
        if path.suffix.lower() == ".npy":
            file, raw = _of_numpy(where, path), False
        else:
            file, raw = _of_bin(where, path, np.dtype("uint16" if self.dtype == "auto" else self.dtype))
        if self.dtype not in ("auto", file.dtype):
            raise UserError(f"data.dtype={self.dtype}, but {where} says that it has {file.dtype}", "data.dtype=auto")
        if raw:
            if self.dtype == "auto" and (vocabulary or 0) > 2**16:
                why = f"has no header that says its type, and {vocabulary:,} token ids take 32 bits"
                raise UserError(f"{where} {why}", "data.dtype=uint32")
            if (bits := _bits(path)) > 8 * np.dtype(file.dtype).itemsize:
                why = f"has no header that says its type, and zeros between its numbers, as where each has {bits} bits"
                if bits == 32:
                    raise UserError(f"{where} {why}", "data.dtype=uint32")
                raise UserError(f"{where} {why}; write them anew as uint32")
        return file

    def _flat(self, where: str, path: Path) -> TokenFile:
        """Return the ``input_ids`` of a parquet file, converted once into a flat file of the cache."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{where} is no parquet file that opens ({error}); fetch or write it again") from None
        names = [field.name for field in table.schema_arrow]
        if "input_ids" not in names:
            text = f"data=hub {typed('data.name', str(path))}" if "text" in names else ""
            problem = f"{where} has no column input_ids; its columns are {shortened(names, 20)}"
            raise UserError(problem, *filter(None, [text]), mistake="data.path")
        kind = table.schema_arrow.field("input_ids").type
        if not pa.types.is_integer(getattr(kind, "value_type", pa.null())):
            raise UserError(f"{where}: input_ids is {kind}; a row has a list of whole numbers there")
        wanted = "uint32" if self.dtype == "auto" else self.dtype
        stat = path.stat()
        of = digest([str(path.absolute()), stat.st_size, stat.st_mtime_ns, wanted])
        cache = cache_folder(self.cache_dir)
        flat = cache / "tokens" / f"{path.stem}-{of}.bin"
        with building(cache, flat):
            if not flat.exists():
                unfinished, rows = flat.with_name(f".{flat.name}.partial"), 0
                reading = work(f"converting {path.name}", table.metadata.num_rows, "rows")
                with unfinished.open("wb") as file, reading as advance:
                    for batch in table.iter_batches(1024, columns=["input_ids"]):
                        try:
                            ids = batch.column(0).flatten().cast(wanted)
                            if ids.null_count:
                                raise pa.ArrowInvalid("some are null")
                            ids.to_numpy().tofile(file)
                        except pa.ArrowException as error:
                            raise UserError(
                                f"{where}: input_ids from row {rows:,} on are no {wanted} ({error})"
                            ) from None
                        rows += len(batch)
                        advance(rows)
                flush(unfinished)
                unfinished.rename(flat)
        count = flat.stat().st_size // np.dtype(wanted).itemsize
        if not count:
            raise UserError(f"{where} has no ids in input_ids")
        return TokenFile.of(flat, wanted, 0, count)

    def _check(
        self, opened: Sequence[tuple[str, TokenFile]], tokenizer: Tokenizer | None, vocabulary: int | None, remedy: str
    ) -> int:
        """Return the largest id; ``remedy``: for ids that are not the tokenizer's, for the message.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        largest, done = 0, 0
        total = sum(file.length for _, file in opened)
        with work("checking the ids", total, "ids") as advance:
            for where, file in opened:
                low, high = cached("token_ids", file._asdict(), partial(_range, file, advance, done))
                largest, done = max(largest, high), done + file.length
                advance(done)
                most = vocabulary or _MOST_NUMBERS
                if low >= 0 and high < most:
                    continue
                start, ids = next(chunk for chunk in _chunks(file) if chunk[1].min() < 0 or chunk[1].max() >= most)
                place = int(np.argmax((ids < 0) | (ids >= most)))
                what = f"{where}: id number {start + place:,} is {ids[place]:,}"
                if tokenizer is not None:
                    raise UserError(f"{what}, and {tokenizer.label} has the ids 0 to {most - 1:,}; {remedy}")
                if vocabulary is None:
                    raise UserError(f"{what}, which is rather of another type; set data.dtype, or data.vocab_size")
                raise UserError(f"{what}, and data.vocab_size={vocabulary} has the ids 0 to {most - 1:,}")
        return largest


def _paths(key: str, name: str) -> tuple[Path, list[Path]]:
    """Return the files that an option names, in the order of their names, and the folder that they lie in or below.

    Raises:
        UserError: there are none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() not in ENDINGS:
            raise UserError(f"{key}: the name of a file of token ids ends with {', '.join(ENDINGS)}")
        return path.parent, [path]
    if path.is_dir():
        root, inside = path, sorted(path.iterdir())
    elif glob.has_magic(name):
        root = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
        inside = sorted(map(Path, glob.glob(str(path), recursive=True)))
    else:
        raise missing(key)
    files = [file for file in inside if file.is_file() and not file.name.startswith(".")]
    shards = [file for file in files if file.suffix.lower() in ENDINGS]
    if not shards:
        has = shortened([file.name for file in inside], 5) if inside else "nothing"
        below = sorted({file.suffix for file in root.rglob("*") if file.suffix in ENDINGS})
        remedies = [typed(key.partition("=")[0], f"{root}/**/*{suffix}") for suffix in below]
        raise UserError(f"{key}: no file of token ids ({', '.join(ENDINGS)}) is there (it has {has})", *remedies)
    return root, shards


def _names(files: Sequence[TokenFile]) -> str:
    return Path(files[0].path).name if len(files) == 1 else counted(len(files), "file")


def _of_bin(where: str, path: Path, raw: np.dtype[Any]) -> tuple[TokenFile, bool]:
    """Return the ids of a ``.bin``, and whether no header says their type, which is then ``raw``."""
    size, header = path.stat().st_size, np.fromfile(path, "<i4", 3).tolist()
    if header[:1] == [_EVALUATIONS]:
        raise UserError(f"{where} has questions with answers, as llm.c writes them for evaluation, and no text")
    if header[:1] and header[0] in _HEADERS:
        version, dtype = _HEADERS[header[0]]
        if header[1] != version:
            raise UserError(f"{where} has llm.c's header in version {header[1]}; version {version} is read")
        expected = _HEADER_BYTES + header[2] * np.dtype(dtype).itemsize
        if size != expected:
            is_short = "cut off" if size < expected else "of another program"
            raise UserError(
                f"{where} is {is_short}: its header says {header[2]:,} ids, which take {expected:,} bytes, and it has "
                f"{size:,}; fetch or write it again"
            )
        if not header[2]:
            raise UserError(f"{where} has no ids; fetch or write it again")
        return TokenFile.of(path, dtype, _HEADER_BYTES, header[2]), False
    if size % raw.itemsize:
        raise UserError(
            f"{where} has {size:,} bytes, and ids of type {raw.name} take {raw.itemsize} each: it is cut off, or "
            "something else; fetch or write it again"
        )
    return TokenFile.of(path, raw.name, 0, size // raw.itemsize), True


def _bits(path: Path) -> int:
    """Return the bits of each id at the beginning of a file: 32 or 64 where all above the lower 16 are 0; else 16."""
    halves = np.fromfile(path, "<u2", _TRIED)
    if halves[::2].any():
        for bits in (64, 32):
            if not any(halves[place :: bits // 16].any() for place in range(1, bits // 16)):
                return bits
    return 16


def _of_numpy(where: str, path: Path) -> TokenFile:
    """Return the ids of a ``.npy``."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{where} is no array that opens ({error}); fetch or write it again") from None
    if array.dtype.kind not in "iu":
        raise UserError(f"{where} has {array.dtype}; token ids are whole numbers, such as uint16")
    if array.ndim != 1:
        raise UserError(
            f"{where} has the shape {' × '.join(map(str, array.shape))}; wanted are ids in one row, ids.reshape(-1)"
        )
    if not len(array):
        raise UserError(f"{where} has no ids; fetch or write it again")
    dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
    return TokenFile.of(path, dtype, array.offset, len(array))


def _chunks(file: TokenFile) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the ids of a file, some megabytes at a time, and how many come before."""
    dtype = np.dtype(file.dtype)
    for start in range(0, file.length, _AT_ONCE):
        count, offset = min(_AT_ONCE, file.length - start), file.offset + start * dtype.itemsize
        yield start, np.fromfile(file.path, dtype, count, offset=offset)  # mapped, all of it would seem to be in memory


def _range(file: TokenFile, advance: Callable[..., None], done: int) -> tuple[int, int]:
    """Return the smallest and the largest id of a file; ``done`` ids of others were read before."""
    low, high = 0, 0
    for start, ids in _chunks(file):
        low, high = min(low, int(ids.min())), max(high, int(ids.max()))
        advance(done + start + len(ids))
    return low, high
