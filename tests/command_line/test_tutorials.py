"""Every tutorial can be followed: its commands run as they are, in order, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import PROJECT

TUTORIALS = sorted((PROJECT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page: Path, folder: Path) -> None:
    for name in ("scripts", "LICENSE"):
        (folder / name).symlink_to(PROJECT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(PROJECT), "COLUMNS": "120"}
    printed = ""
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "bash":
            done = subprocess.run(
                ["bash", "-ec", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            printed = done.stdout
            continue
        place = 0
        for line in text.splitlines():  # in this order; … stands for what differs
            wanted = ".*".join(re.escape(part) for part in line.strip().split("…"))
            found = re.compile(rf"^\s*{wanted}\s*$", re.MULTILINE).search(printed, place)
            assert found, f"{line}\nis not in\n{printed}"
            place = found.end()
