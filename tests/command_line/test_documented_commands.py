"""Commands in README, docs, help texts and YAML comments can be pasted: into bash, and into zsh, which is stricter."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import PROJECT, SHIPPED

PAGES = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").glob("*.md"))]
FILES = [*PAGES, *SHIPPED, *sorted((PROJECT / "scripts").glob("*.py")), PROJECT / "trainer/config/help.py"]
COMMAND = re.compile(
    r"(?:#|\$|``)?\s*((?:[A-Z_]+=\S+ )*"
    r"(?:python (?:scripts/|benchmarks/[bg])|torchrun |make |sbatch |pip |docker |source )[^`]*)"
)
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.")
KEY_VALUE = re.compile(r"^[\w./+~-]+=\[")


def commands(path: Path) -> list[str]:
    """The command lines of a file: indented, within the text, in a comment or a docstring; continued lines joined."""
    text = re.sub(r"\\\n\s*#?\s*", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"#!/bin/bash(\n    .*)*", "", text)  # a script, where comments are comments
    lines = text.splitlines()
    if path.suffix == ".md":  # and within the text, where no part of them is left open; not what was recorded of advice
        text = re.sub(r"<!-- (advice|outcomes): made by .*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
        spans = re.findall(r"`((?:python (?:scripts/|benchmarks/[bg])|torchrun )[^`\n…<]+)`", text)
        lines = [*(line for line in lines if line.startswith("    ")), *spans]
    return [found[1].strip() for line in lines if (found := COMMAND.match(line.strip()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_can_be_pasted_into_zsh(page: Path) -> None:
    """It knows no comments: their words would become arguments. And it would look for files that fit a list."""
    for command in commands(page):
        assert " #" not in QUOTED.sub("", command), f"put the comment into the text: {command}"
    for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        for word in QUOTED.sub("", span).split():
            assert not KEY_VALUE.match(word), f"quote {word}"


@pytest.mark.parametrize("shell", ["zsh", "bash"])
def test_a_shell_passes_every_command_unchanged(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    every = [command for path in FILES for command in commands(path)]
    found = [command for command in every if not set("<>$…|") & set(command)]
    assert len(found) > 40
    options = ["-f"] if shell == "zsh" else ["--norc", "-O", "failglob"]
    script = "\n".join(f"printf '%s\\n' {command.partition(' # ')[0]}; echo ---" for command in found)
    done = subprocess.run([program, *options, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    for command, words in zip(found, done.stdout.split("---\n")[:-1], strict=True):
        assert words.splitlines() == shlex.split(command, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_files_and_sections_that_the_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:benchmarks|conf|docs|evidence|inference|mantissa|recipes|scripts|tests|trainer)/[\w/.-]+)`", text
    ):
        assert (PROJECT / name).exists(), name
    for target, section in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", text):
        other = page.parent / target if target else page
        assert other.exists(), target
        if section:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, (
                section
            )
