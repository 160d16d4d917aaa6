"""What a message says to do instead is done, as a user would, and ends well."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line.conftest import Train
from tests.command_line.test_mistakes import TYPED
from tests.recipes.test_wrong_options import ROWS as RECIPES
from tests.trainer.test_wrong_options import ROWS as COMPONENTS
from trainer.config.explain import known_options
from trainer.config.registration import groups
from trainer.config.step import StepConfig
from trainer.trainer import Trainer

VALUE = r"(?:'[^']*'|\w+\([^()…]*\)|\[[^\]…]*\]|\{[^}…]*\}|[^\s,;()'\[{…]+(?:,(?=[\w.-])[^\s,;()'\[{…]+)*)"
SETTING = rf"(?<![\w.+-])(?!key=|\S*[…]|\S+=VALUE|\S+RUN_ID)~?\+?[a-z][\w.]*={VALUE}"
WORD = r"[\w.:/-]*\w"
OR = r"(?:, or |, | or |\|)"
OTHERS = rf"(?:{OR}(?!more\b){WORD}(?=$|[,;|.)]| or )(?![\w.]*=))*"
"""Further values of the key that stands before them: ``micro_batch_size=1 or 7``."""


def key_of(word: str) -> str:
    return word.lstrip("~+-").partition("=")[0].replace("-", "_")


def without(words: list[str], word: str) -> list[str]:
    """A command without a word; a flag goes with its value."""
    at = words.index(word)
    value = word.startswith("--") and "=" not in word and at + 1 < len(words) and "=" not in words[at + 1]
    return words[:at] + words[at + 1 + value :]


def with_settings(words: list[str], settings: str) -> list[str]:
    """A command with settings in the place of those of the same key, and of what a new choice does not have."""
    for setting in shlex.split(settings):
        key, _, value = setting.lstrip("+~").partition("=")
        if value in groups().get(key, {}):
            kept = {name for name, owners in known_options().items() if {value, key, ""} & {*owners}}
            words = [word for word in words if not key_of(word).startswith(f"{key}.") or key_of(word) in kept]
        words = [*(word for word in words if key_of(word) not in (key, key.removeprefix("space."))), setting]
    return words


def allowed(said: str) -> list[str]:
    """What a value must be, as a message says: the ends of an interval, or a value of a type."""
    if found := re.search(r"must be true(?:,| or) false( or auto)?", said):
        return ["true", "false", *["auto"] * bool(found[1])]
    if found := re.search(r"must lie between (\d+) and (\d+)", said):
        return [found[1], found[2]]
    if found := re.search(r"must be a whole number(?: of at least (\d+))?(, or auto)?", said):
        return [found[1] or "2", *["auto"] * bool(found[2])]
    if found := re.search(r"must be (at least|above) (-?[\d.]+)(?: and (at most|below) ([\d.]+))?", said):
        low, high = float(found[2]), float(found[4] or float(found[2]) + 2)
        ends = [found[2]] * (found[1] == "at least") + [str(found[4])] * (found[3] == "at most")
        return [*ends, *[str((low + high) / 2)] * (not ends)]
    return []


def meant(words: list[str], said: str, near: str) -> list[str]:
    """The command with what is nearest in the place of what the message names before it."""
    before = said.partition("; did you mean")[0]
    for key, value in re.findall(r"([\w.]+)=(\S+?):? (?:is|must|has|timm|there)\b", before)[-1:]:
        value = value.strip("[]")
        return [word.replace(value, near) if key_of(word).removeprefix("space.") == key else word for word in words]
    if option := re.search(r"(\S+)\.(\w+): \w+ has no such argument", before):
        return [word.replace(f"{option[1]}.{option[2]}=", f"{option[1]}.{near}=") for word in words]
    names = re.findall(r"'(\S+)'", before) or re.findall(r"([\w.]+):? (?:is|has)\b", before)
    wrong = names[-1]  # a key, or the first part of one, or a name within a value
    if "=" in near:
        key = near.partition("=")[0]
        words = [word.replace(f"space.{wrong}=", f"space.{key}=") for word in words]
        return [near if key_of(word) == wrong else word for word in words]
    return [re.sub(rf"(?<!\w){re.escape(wrong)}\b", near, word, count=1) for word in words]


def remedies(words: list[str], said: str) -> list[list[list[str]]]:
    """What a message says to do: the commands to give in the place of the one with these words.

    Each remedy has one, or several of which one must end well, such as the choices to which an option belongs.
    """
    said = said.strip()
    found: list[list[list[str]]] = []
    for arm in [word for word in words if word.startswith("arm.")]:
        label, _, text = arm.partition("=")
        if any(re.search(rf"\b{re.escape(key_of(word))}\b", said) for word in text.split()) and "per value" not in said:
            inner = remedies(text.split(), re.sub(r"arm \w+: ", "", said))
            return [
                [[f"{label}={' '.join(way)}" if word == arm else word for word in words] for way in ways]
                for ways in inner
            ]
    places = {word: re.search(rf"(?<![\w.]){re.escape(key_of(word))}(?!\w|\.\w)", said) for word in words}
    named = [word for _, word in sorted((place.start(), word) for word, place in places.items() if place)]
    subject = named[0] if named else ""
    fact, _, advice = re.sub(r"\. Use |: (?:set|start|write) ", "; use ", said).partition("; ")

    def with_value(text: str) -> list[str]:
        text = text.strip("'\"")
        key, equals, _ = subject.partition("=")
        return [f"{key}={text}" * bool(equals) or text if word == subject else word for word in words]

    if near := re.search(r"did you mean '([^'…]+)'", said):
        words = meant(words, said, near[1])
        found += [[words]] * ("it belongs to" not in said)
        said, advice = (re.sub(r";? ?did you mean '[^']*'\?", "", text) for text in (said, advice))
    if example := re.search(r"missing required option: (\S+); set .*such as (\S+)$", said):
        found.append([[*words, f"{example[1]}={example[2]}"]])
    if settings := re.search(rf"(?:such as|as in) \"?({SETTING}(?: {SETTING})*)", fact):
        found.append([with_settings(words, settings[1])])
    if folder := re.search(
        r"^error: (?:\w+=)?(\S+?):? (?:this|there|is).*; give (?:a run folder|one), such as (\S+)$", said
    ):
        found.append([[word.replace(folder[1], folder[2]) for word in words]])
    if several := re.search(r"(\w+)=(\S+) has several values; use one arm per value", said):
        arms = [f"arm.{value}={several[1]}={value}" for value in several[2].split(",")]
        found.append([[*(word for word in words if f"{several[1]}={several[2]}" not in word), *arms]])
    if several := re.search(r"=(\S+) has several values; .*set one", said):
        found.append([with_value(several[1].split(",")[0])])
    example = re.search(
        rf"must (?:be|have) [^;]*?(?:such as|as in) (?!{SETTING})('[^']*'|\S+?)(?=,? or |,? and |[;)]|$)", said
    )
    found += [[with_value(each)] for each in ([example[1]] if example else allowed(said))]
    if entry := re.search(r"set (\+\S+)\.NAME=VALUE", said):
        found.append([[f"{entry[1]}.name=1" if word == subject else word for word in words]])
    if removed := re.search(r"leave it out, or, .* remove it with (~[\w.]+)", advice):
        there = [removed[1] if key_of(word) == removed[1][1:] else word for word in words]
        found.append([[word for word in words if key_of(word) != removed[1][1:]], there])
    elif subject in words and re.search(r"(?:leave|remove) (?:it|them)\b", advice):
        found.append([without(words, subject)])
    if other := re.search(
        r"(?:leave out|remove) (-m|[\w.]+)(?:$|[,;])|leave (\S+?)=\S+ out|leave out \w+=(\S+)", advice
    ):
        gone = other[1] or other[2] or next(word for word in words if word.endswith(other[3]))
        found += [[[word for word in words if gone not in (word, key_of(word))]]] * (gone not in ("it", "both"))
        advice = re.sub(r"leave \S+ out|leave out \w+=\S+", "", advice)
    if re.search(r"one of them|neither of them|drop one", advice):
        found += [[without(words, word)] for word in named[:2]]
    if "without the +" in advice:
        found.append([[word.lstrip("+") for word in words]])
    if added := re.search(r"add it with \+([\w.]+)=…", advice):
        found.append([[f"+{word}" if key_of(word) == added[1] else word for word in words]])
    if "add -m" in advice:
        brackets = "[]" if "no brackets" in advice else ""
        found.append([["-m", *(re.sub(rf"[{re.escape(brackets)}]", "", word) if brackets else word for word in words)]])
    if more := re.search(r"; add (\w+) too", said):
        found.append([[word.replace("]", f",{more[1]}]") if word == subject else word for word in words]])
    if own := re.search(r"(\S+) has its own key: set (\S+)=…", said):
        found.append([[word.lstrip("+").replace(own[1], own[2]) for word in words]])
    if item := re.search(r"use (\[\w+\])$", said):
        found.append([with_value(item[1])])
    if number := re.search(r"^error: ([\w.]+).*; set it to (\S+)$", said):
        found.append([with_settings(words, f"{number[1]}={number[2]}")])
    if score := re.search(r"set (\S+) to one of (\S+?)(?:,|$)", said):
        found.append([with_settings(words, f"{score[1]}={score[2]}")])
    replaced = subject.startswith("--") or "no effect" in fact or "without it" in advice or ": write" in said
    replaced |= "search another" in advice
    kept = without(words, subject) if replaced and subject in words else words
    if same := re.search(r"arm (\S+) is the same", fact):
        kept = [word for word in kept if not word.startswith(f"arm.{same[1]}=")]
    kept = [word for word in kept if "=" in word[1:-1] or "is not an override" not in said]
    advice = re.sub(
        r"python (?:scripts/|-m ).*|(?:, or )?use scripts/\S+|(?:give a run of|train with) [^,]*", "", advice
    )
    advice = re.sub(r"'(\w[\w.]*=\S+)'", r"\1", advice)
    end_of_sentence = re.compile(r"(?<=\w)\.$")
    settings: list[list[str]] = []
    for match in re.finditer(rf"({SETTING}(?: {SETTING})*)({OTHERS})", advice):
        key, _, first = match[1].rpartition("=")
        command = words if "with precision=" in fact and key == "precision" else kept
        values = [*first.split("|"), *re.split(OR, match[2])[1:]]
        settings += [with_settings(command, f"{key}={end_of_sentence.sub('', each)}") for each in values]
    is_any = "it belongs to" in advice or "the encoding that" in advice
    found += [settings] * bool(settings) if is_any else [[each] for each in settings]
    several = rf"use (?!\[|another\b)({WORD}(?:{OR}(?!more\b){WORD}(?=$|[,;|.)]| or ))*)(?=$|[,;]| or )(?!=)"
    for match in re.finditer(several, advice):
        found += [[with_value(each)] for each in re.split(OR, match[1])]
    return found


class Began(BaseException):
    """All that was typed has been accepted."""


TryOut = Callable[..., tuple[Any, str]]


@pytest.fixture
def try_out(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TryOut:
    """``try_out(words)``: the place that a command of train.py did not come to, and its message."""

    def begin(*_: object, **__: object) -> None:
        raise Began

    def attempt(words: list[str], *places: tuple[type, str]) -> tuple[Any, str]:
        keys = {*map(key_of, words)}
        for choice, small in SMALL.items():
            words = [*words, *(each for each in small if choice in words and not keys & {key_of(each), "init_from"})]
        for place in places or [(StepConfig, "open_datasets"), (Trainer, "train_step")]:
            with monkeypatch.context() as patch:
                patch.setattr(*place, begin)
                try:
                    done = train(*words)
                except Began:
                    continue
            if done.code:
                return place, done.err
        return None, ""

    for name in ("empty", "runs/mine", "exported", "docs"):
        (folder / name).mkdir(parents=True)
    (folder / "runs/mine/config.json").write_text('{"precision.mode": "bf16"}')
    (folder / "exported/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "docs.jsonl").write_text('{"text": "a row of words"}\n' * 900)
    for name in ("notes.txt", "LICENSE"):
        (folder / name).write_text("one two three four five\n" * 900)
    text = "naïve café: “one” and two\n" * 900
    for encoding in ("utf-8", "utf-16", "utf-32", "cp1252"):
        (folder / f"{encoding.replace('-', '')}.txt").write_bytes(text.encode(encoding))
    (folder / "cp1251.txt").write_bytes(("Привет, мир. Как дела?\n" * 900).encode("cp1251"))
    for name in ("images/one", "broken/one", "broken/two", "packed/shapes/one", "packed/shapes/two"):
        write_images(folder / name)
    for number in range(4):
        (folder / f"broken/one/{number}.png").write_bytes(b"no image")
    return attempt


def write_images(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(folder / f"{number}.png")


def components() -> Iterator[str]:
    """Mistakes in a component, as they are typed."""
    for make, options, _ in COMPONENTS:
        for group, classes in groups().items():
            for kind in [kind for kind, cls in classes.items() if cls is make]:
                words = ["recipe=bignet", f"{group}={kind}"][: 1 + (kind != group)]
                words += ["precision=fp16"] * (group == "scaler")
                given = {f"{group}.{key}": value for key, value in options.items()}
                if isinstance(given.get("optimizer.options"), dict):
                    given = {f"+optimizer.options.{key}": value for key, value in options["options"].items()}
                for key, value in given.items():
                    text = str(value).replace("'", "").replace(" ", "")
                    words.append(f"{key.removesuffix('.mode') if group == 'precision' else key}={text}")
                yield shlex.join(words)


MORE = r"""
recipe=bignet epochs=2 steps=10
recipe=bignet threads=0
recipe=bignet steps=10 schedule.warmup_steps=20
recipe=bignet output_dir=
recipe=bignet early_stopping.min_delta=1
recipe=bignet early_stopping.metric=valid/los
recipe=bignet checkpoint.best=los
recipe=bignet metrics=[accuracy]
recipe=gpt2 recipe.pretrained=gpt2
recipe=resnet precision=mxfp8
recipe=bignet precision=bf16 precision.fp32_ops=[sofmax]
recipe=bignet precision=bf16_pure 'precision.fp32_modules=["*"]'
recipe=gpt2 data=synthetic recipe.size=nano precision=bf16_pure precision.fp32_modules=[lm_head]
recipe=bignet precision=bf16 precision.fp32_modules=[layerz]
recipe=bignet precision=bf16 scaler=dynamic
recipe=bignet precision=bf16 scaler=static
recipe=bignet precision=fp16_pure optimizer.name=NAdam
recipe=bignet precision=fp16_pure optimizer=adamw optimizer.fused=false
recipe=bignet optimizer=muon diagnostics=numerics
recipe=bignet optimizer.state=int4
recipe=bignet optimizer.state=bf16 precision=bf16_pure
recipe=bignet optimizer.state=bf16 optimizer=sgd
recipe=bignet optimizer.state=bf16 +optimizer.options.amsgrad=true
recipe=bignet checkpoint=none checkpoint.save_on_signal=[USR1]
recipe=bignet checkpoint.save_on_signal=[KILL]
recipe=bignet tracking.register=a/b
recipe=bignet tracking.register=best tracking=local
recipe=bignet tracking.uri=runs.db
recipe=bignet freeze=['*']
recipe=bignet freeze=[layerz]
recipe=bignet freeze=['0.0'] 'optimizer.groups={0.0.*:{lr:2}}'
recipe=bignet 'optimizer.groups={*.bias:{weight_decay:0.1}}'
recipe=bignet 'optimizer.groups={0.1:2}'
recipe=resnet recipe.arch=squeezenet1_1 optimizer=muon
recipe=bignet optimizer.name=Rprop ~optimizer.options.betas
recipe=bignet optimizer.name=nowhere.Lion
recipe=bignet +optimizer.options.foreach=true
recipe=bignet +optimizer.options.lr=0.1
recipe=bignet optimizer.options={momentum:0.9}
recipe=bignet optimizer.name=SGD optimizer.options.momentum=0.9
recipe=bignet parallel=ddp
recipe=bignet parallel=fsdp
recipe=bignet device=cuda
recipe=bignet device=cuda:3
recipe=bignet device=gpu
recipe=bignet device=hpu
recipe=resnet recipe.mean=[0.5,0.5,0.5]
recipe=resnet recipe.mean=0.5 recipe.std=[1,1,1]
recipe=resnet recipe.arch=squeezenet1_1 recipe.image_size=8
recipe=resnet recipe.arch=vit_b_16 recipe.train_image_size=64
recipe=resnet recipe.class_weights=[1,-1,2]
recipe=resnet recipe.bce_threshold=2 recipe.criterion=bce
recipe=gpt2 data=text data.path=notes.txt recipe.context=4096
recipe=gpt2 data=synthetic recipe.size=nano recipe.lora.rank=2 recipe.lora.target=[c_atn]
recipe=llama init_from=exported
recipe=gpt2 init_from=exported recipe.size=nano
recipe=llama init_from=exported recipe.layers=2
recipe=gpt2 data=text data.path=note.txt
recipe=gpt2 data=text data.path=docs
recipe=gpt2 data=text data.path=. data.pattern=*.md
recipe=gpt2 data=hub data.name=docs.jsonl data.text_column=txt
recipe=gpt2 data=hub data.name=docs.jsonl data.train_split=trian
recipe=gpt2 data=hub data.name=docs.jsonl data.test=train
recipe=gpt2 data=text data.path=notes.txt data.test=notes.txt
recipe=gpt2 data=text data.path=notes.txt data.tokenizer=./nowhere
recipe=gpt2 data=text data.path=utf16.txt
recipe=gpt2 data=text data.path=utf32.txt
recipe=gpt2 data=text data.path=cp1252.txt
recipe=gpt2 data=text data.path=cp1251.txt
recipe=gpt2 data=text data.path=notes.txt data.encoding=utf-16
recipe=gpt2 data=text data.path=utf8.txt data.encoding=ascii
recipe=gpt2 data=synthetic recipe.gelu=erf init_from=exported
recipe=resnet data=imagefolder data.path=images
recipe=resnet data=imagefolder data.path=broken recipe.arch=squeezenet1_1
recipe=bignet learning_rate=0.1
recipe=bignet max_steps=10
recipe=bignet grad_clip=1.0
recipe=bignet num_workers=2
recipe=bignet amp=bf16
recipe=bignet momentum=0.9
recipe=bignet workers=2
recipe=bignet optimizer.lr=[1]
recipe=bignet batch_size=8.5
recipe=[gpt2,bignet]
recipe=bignet --batch-size 8
recipe=bignet --lr=0.1
recipe=bignet clip=norm clip.max_norm=-1
recipe=bignet loader.workers=[2]
recipe=bignet deterministic=yess
recipe=bignet recipe.layers=2.5
recipe=bignet clip.max_norm=1.0
recipe=bignet clip.max_value=1.0
recipe=bignet schedule=wsd schedule.warmup=10
recipe=bignet ema.decay=0.9
recipe=bignet schedule.rise=0.2
recipe=bignet profiler.wait=1
recipe=bignet init_from=runs/mine
recipe=resnet init_from=docs
recipe=resnet resume=runs
recipe=bignet max_epochs=2
recipe=bignet num_train_epochs=2
recipe=bignet per_device_train_batch_size=8
recipe=bignet weight_decay=0.1
recipe=bignet warmup_steps=3
recipe=bignet gradient_checkpointing=true
recipe=bignet logger=local
recipe=bignet bf16=true
recipe=bignet mixed_precision=bf16
recipe=bignet default_root_dir=here
recipe=bignet fast_dev_run=true
recipe=bignet save_steps=5
recipe=bignet seed_everything=1
recipe=bignet overfit_batches=1
recipe=bignet ckpt_path=auto
recipe=bignet strategy=single
recipe=bignet accelerator=cpu
recipe=bignet devices=2
recipe=bignet gradient_clip_val=1.0
recipe=bignet accumulate_grad_batches=4
recipe=bignet --gradient_checkpointing
recipe=bignet --num_train_epochs 2
recipe=bignet clip=1.0
recipe=bignet ema=0.99
recipe=bignet loader=2
"""

SMALL = {"recipe=bignet": ["recipe.layers=2", "recipe.width=16"], "recipe=gpt2": ["recipe.size=nano"]}
"""What makes a model small, where a command does not choose it."""
CASES = [*TYPED, *(f"recipe={row}" for row in RECIPES), *components(), *filter(None, MORE.split("\n"))]
NOT_HERE = re.compile(
    r"missing required option|is not available on|torch finds no|does not answer|weights.pth: there is no|"
    r"/folder is not a|outputs/gpt2-bf16-s0: there is no such folder|recipe was None"
)
"""Ends of a second command that names what only the user has: a GPU, the network, a file of data."""

OPEN = re.compile(
    r"=…|FOLDER|another|give |set data.test|set it to one|such a name|separated|\)$|has the splits|"
    r"examples of names|the name of a folder|numbers|<name>|needs a name|finish it with|train it again|"
    r"rename their class|remove them from|use a folder|RUN_ID|name the one|not found|torchrun in|install|fewer|"
    r"write 0.1|lr one above|one of its options|--cfg job|must be a folder|set a folder|refuses"
)
"""Advice that leaves to the user what to set."""


def check_remedies(words: list[str], said: str, end: Callable[[list[str]], str]) -> None:
    """Do what a message about a command says; ``end`` gives a command, and returns the message it ends with, if any."""
    attempts = remedies(words, said)
    assert attempts or OPEN.search(said), said
    for each in attempts:
        ends = [end(attempt) for attempt in each]
        assert any(not said or NOT_HERE.search(said) for said in ends), f"{said}{[*zip(each, ends, strict=True)]}"


@pytest.mark.parametrize("command", dict.fromkeys(CASES))
def test_what_a_message_says_to_do_is_accepted(command: str, try_out: TryOut) -> None:
    words = shlex.split(command)
    place, said = try_out(words)
    assert said, "no mistake"
    check_remedies(words, said, lambda attempt: try_out(attempt, place)[1])
