"""What a message of evaluate.py, generate.py and predict.py says to do instead is typed, and ends well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line.test_remedies import cells, names
from tests.inference.conftest import script

# What both commands have | the mistake | what its message says to write instead | or instead; "-" is nothing.
ROWS = """
evaluate run=outputs/gpt2 eval_samples=8 | recipe=llama | -
evaluate run=outputs/gpt2 eval_samples=8 | optimizer.lr=1 | -
evaluate run=outputs/gpt2 eval_samples=8 | preciison=bf16 | precision=bf16
evaluate run=outputs/gpt2 eval_samples=8 | micro_batch_size=4,8 | micro_batch_size=4
evaluate run=outputs/gpt2 eval_samples=8 | split=test | split=valid | split=all
evaluate run=outputs/gpt2 data=text data.path=other.txt eval_samples=8 | data.tokenizer=chars | -
evaluate run=outputs/images | recipe.mean=[0,0,0] | -
evaluate run=outputs/images | path=photos | data.path=photos
evaluate run=outputs/images | split=test | split=valid | split=all
generate run=outputs/gpt2 prompt=a max_new_tokens=4 | temperature=-1 | temperature=0
generate run=outputs/gpt2 prompt=a max_new_tokens=4 | top_p=0 | top_p=1
generate run=outputs/gpt2 prompt=a max_new_tokens=4 | data=text | -
generate run=outputs/gpt2 prompt=a max_new_tokens=4 | precision=bf61 | precision=bf16
run=outputs/bert | generate prompt=a | evaluate eval_samples=8
run=outputs/images | generate prompt=a | predict path=photos
run=outputs/bert | predict path=photos | evaluate eval_samples=8
run=outputs/gpt2 | predict path=photos | evaluate eval_samples=8
"""
SCRIPTS = {name: script(f"inference.{name}:{name}") for name in ("evaluate", "generate", "predict")}


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_what_a_script_says_to_do_ends_well(row: str, here: Path) -> None:
    common, wrong, remedies = cells(row)

    def run(words: list[str]) -> tuple[int, str]:
        command = [*common, *words]
        (name,) = SCRIPTS.keys() & {*command}
        done = SCRIPTS[name](*(word for word in command if word != name))
        return done.code, done.err

    code, said = run(wrong)
    assert code == 2
    for words in remedies:
        assert words[0] in said if SCRIPTS.keys() & {*words} else names(said, wrong, words)
        assert run(words)[0] == 0
