"""The examples of docs/library.md run as they stand, and show what the page shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trainer.files import PROJECT

TEXT = (PROJECT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "import mantissa" in block]
SHOWN = re.findall(r"\n    (FOUND .*?)\n\n", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    runpy.run_path("example.py")
    printed = capsys.readouterr().out
    if "examine" in EXAMPLES[number]:
        assert Path("report/report.html").is_file()
        wanted = ".*".join(re.escape(part) for part in re.sub("\n    ", "\n", SHOWN[0]).split("…"))
        assert re.search(wanted, printed, re.DOTALL), printed
    else:
        assert "requested: bf16" in printed
