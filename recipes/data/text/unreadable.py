"""What a file is that cannot be read as text, and what makes text of it."""

from __future__ import annotations

import shlex
from pathlib import Path

_ENCODED = (
    "set data.encoding={1}; or, if other files are in another encoding, write this one anew, with: "
    "iconv -f {1} -t utf-8 {0} > {0}.new && mv {0}.new {0}"
)
_KINDS = {
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd"), "is compressed; unpack it"),
    b"PK\x03\x04": "is a zip archive, as .docx, .odt and .epub are; save it as plain text, or unpack it: unzip {0}",
    b"%PDF": "is a PDF; make text of it with: pdftotext {0} {0}.txt",
    b"\xff\xfe\0\0": "is UTF-32; " + _ENCODED.replace("{1}", "utf-32"),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "is UTF-16; " + _ENCODED.replace("{1}", "utf-16")),
}
"""By the first bytes of a file; the longer ones come first."""
_SAMPLE = 1 << 20
_AROUND = 12
"""Bytes before and after a wrong one that are shown."""


def is_utf8(path: Path) -> bool:
    """Return whether most letters beyond ASCII in the beginning of a file are UTF-8."""
    with path.open("rb") as file:
        high = [letter for letter in file.read(_SAMPLE).decode(errors="surrogateescape") if not letter.isascii()]
    return sum(not "\udc80" <= letter <= "\udcff" for letter in high) > len(high) / 2


def described(path: Path, encoding: str) -> str:
    """Return what is wrong with the text of a file, which was not read to its end, and what to do about it."""
    quoted = shlex.quote(str(path))
    with path.open("rb") as file:
        begin, place, wrong = file.read(_SAMPLE), 0, None
        for start, kind in _KINDS.items():
            if begin.startswith(start) and f"={encoding.lower()};" not in kind:
                return kind.format(quoted)
        file.seek(0)
        for line in file:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                wrong = error.start
                break
            place += len(line)
    zeros = [begin[odd::2].count(0) > len(begin) / 8 for odd in (0, 1)]
    if zeros in ([True, False], [False, True]):
        return f"is UTF-16; {_ENCODED.format(quoted, 'utf-16be' if zeros[0] else 'utf-16le')}"
    if b"\0" in begin or (wrong is None and encoding.startswith("utf-8")):
        return f"is not {encoding} text: it has a zero byte; give a file of text"
    if wrong is None:
        return f"is not {encoding} text but UTF-8; leave out data.encoding"
    where = f"is not {encoding} text: it has the byte 0x{line[wrong]:02x} at offset {place + wrong:,}"
    if is_utf8(path):  # but for some bytes
        return (
            f"{where}, among valid UTF-8; leave such bytes out with: iconv -c -f utf-8 -t utf-8 {quoted} > {quoted}.txt"
        )
    if sum(byte > 127 for byte in begin) > len(begin) / 4:
        return f"{where}; set the encoding that it was written in, such as data.encoding=cp1251, gb18030 or shift_jis"
    part = line[max(0, wrong - _AROUND) : wrong + _AROUND]
    for choice in ("cp1252", "latin1"):
        try:
            begin.decode(choice)
        except UnicodeDecodeError:
            continue
        break
    return f"{where}, in {choice} {part.decode(choice, 'replace').strip()!r}; {_ENCODED.format(quoted, choice)}"
