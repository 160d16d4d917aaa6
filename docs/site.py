"""Hooks of the site: pages from the repository's root, and links that leave docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site by their files in the root."""
LINK = re.compile(r"(?<=\])\(([^)#\s:]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Take each link that leaves docs/ to its page, or to the file in the repository if ``REPO_URL`` is set."""
    own = page.file.src_uri
    source = {new: old for old, new in PAGES.items()}.get(own, f"docs/{own}")

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        inside = PAGES.get(path) or ("index.md" if path == "docs/README.md" else path.removeprefix("docs/"))
        if path in PAGES or path.startswith("docs/"):
            return f"({posixpath.relpath(inside, posixpath.dirname(own))}{found[2]})"
        if not (ROOT / path).exists():
            return found[0]  # mkdocs says that it leads nowhere
        return f"({config.repo_url.rstrip('/')}/blob/main/{path}{found[2]})" if config.repo_url else ""

    return LINK.sub(target, markdown)
