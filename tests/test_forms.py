"""The forms for issues are ones that GitHub accepts: it shows no form at all where a key is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.helpers import PROJECT

FORMS = [path for path in sorted((PROJECT / ".github/ISSUE_TEMPLATE").iterdir()) if path.stem != "config"]
NEEDS = {
    "markdown": {"value"},
    "textarea": {"label"},
    "input": {"label"},
    "dropdown": {"label", "options"},
    "checkboxes": {"label", "options"},
}
MAY_HAVE = {"description", "placeholder", "value", "render", "multiple", "default"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_the_keys_that_github_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "title", "labels", "body"}
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    labels = [item["attributes"].get("label") for item in form["body"] if item["type"] != "markdown"]
    assert len(ids) == len(set(ids)) == len(set(labels)) > 0
    assert all(re.fullmatch(r"[\w-]+", each) for each in ids)
    for item in form["body"]:
        assert item.keys() <= {"type", "id", "attributes", "validations"}
        assert NEEDS[item["type"]] <= item["attributes"].keys() <= NEEDS[item["type"]] | MAY_HAVE
        assert all(type(each) is str for each in item["attributes"].values() if not isinstance(each, list | bool))
        for option in item["attributes"].get("options", []):
            assert type(option) is (dict if item["type"] == "checkboxes" else str)
