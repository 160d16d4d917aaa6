"""``recipe=text_classifier``: families of transformers, written here by transformers, and the forms of labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from inference.evaluate import evaluate
from tests.helpers import compose, fit, same_bits, trainer_of
from trainer.checkpoint.reader import load
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.files import read_config
from trainer.metrics import Metrics
from trainer.recipe import LossOutput
from trainer.run.start import train
from trainer.trainer import Trainer

CLASSES = ["bad", "good", "meh"]
WORDS = 40
SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
WIDE = {"initializer_range": 0.2, "max_position_embeddings": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SHAPE | WIDE,
    "roberta": SHAPE | WIDE | {"max_position_embeddings": 33},
    "modernbert": SHAPE | {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48} | WIDE,
    "deberta-v2": SHAPE | WIDE,  # without sdpa
    "qwen3": SHAPE | WIDE | {"num_key_value_heads": 1, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2, "n_positions": 32},
}
DECODERS = ("qwen3", "gpt2")
"""Whose tokenizer here ends a text, and has nothing for padding."""


def sentence(number: int, length: int) -> str:
    return " ".join(f"w{(number * 7 + place * place) % WORDS}" for place in range(length))


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Texts of 1 to 12 words, and one of 40."""
    lengths = [1 + number * 5 % 12 for number in range(count)]
    lengths[5] = 40
    return [{"text": sentence(number, length), "label": CLASSES[number % 3]} for number, length in enumerate(lengths)]


def write_rows(path: Path, given: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, given)))
    return f"data.name={path}"


def write_tokenizer(folder: Path, decoder: bool) -> int:
    """Write a tokenizer of words that adds the special tokens of an encoder; return the number of its ids."""
    special = {"eos_token": "<|end|>"} if decoder else SPECIAL
    names = [*special.values(), *(f"w{index}" for index in range(WORDS))]
    backend = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not decoder:
        ids = [(text, names.index(text)) for text in special.values()]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", **special).save_pretrained(folder)
    return len(names)


def write_model(kind: str, folder: Path, classes: Sequence[str] = CLASSES, cls: Any = None, **more: Any) -> str:
    """Write a small random model; return the option that opens it."""
    torch.manual_seed(0)
    ids = write_tokenizer(folder, kind in DECODERS)
    names = dict(enumerate(classes))
    special = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0} if kind in DECODERS else {"pad_token_id": 0}
    options = special | FAMILIES[kind] | {"vocab_size": ids, "num_labels": len(names), "id2label": names} | more
    config = CONFIG_MAPPING[kind](**options)
    (cls or AutoModelForSequenceClassification).from_config(config).save_pretrained(folder)
    return f"init_from={folder}"


def classifier(folder: Path) -> Path:
    """Write a small pretrained classifier; return its folder."""
    write_model("distilbert", folder)
    return folder


def reviews(folder: Path) -> Path:
    """Write a folder of labelled texts, with a split to validate on, and return it."""
    write_rows(folder / "train.jsonl", rows())
    write_rows(folder / "validation.jsonl", rows(6))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))


def trainer(*options: str) -> Trainer:
    sizes = ("batch_size=4", "micro_batch_size=4", "steps=3", "eval_samples=6")
    return trainer_of("recipe=text_classifier", *sizes, *options)


def logits(folder: Path, texts: Sequence[str], **options: Any) -> torch.Tensor:
    """What transformers computes by itself from a folder, for one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt", **options)).logits for text in texts])


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_is_that_of_transformers_and_padding_changes_nothing(kind: str, tmp_path: Path) -> None:
    source = write_model(kind, tmp_path / "model")
    run = trainer(source, write_rows(tmp_path / "a.jsonl", rows()), "recipe.context=32")
    samples = [SampleId(index, None) for index in range(8)]
    batch = run.datasets.train.batch(samples)
    assert not batch["mask"].all()
    assert batch["mask"].sum(1).max() == 32  # the long one
    if kind == "gpt2":
        assert batch["tokens"][-1, -1] == 0  # the end of a text, where there is nothing for padding
    with torch.no_grad():
        output = run.recipe.loss(run.model.eval(), batch)
        alone = [run.recipe.loss(run.model, run.datasets.train.batch([sample])).loss_sum for sample in samples]
    torch.testing.assert_close(output.loss_sum, torch.stack(alone).sum(), rtol=1e-5, atol=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    model.config.pad_token_id = 0
    given = {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "labels": batch["label"]}
    with torch.no_grad():
        torch.testing.assert_close(output.loss_sum / 8, model(**given).loss, rtol=1e-6, atol=1e-6)
    assert run.recipe.count_targets(batch) == 8
    assert run.recipe.count_units(batch) == batch["mask"].sum()
    assert len(run.recipe.blocks(run.model)) == 2


@pytest.mark.parametrize(("kind", "precision"), [*((kind, "fp32") for kind in FAMILIES), ("bert", "bf16")])
def test_what_is_trained_opens_in_transformers(kind: str, precision: str, tmp_path: Path) -> None:
    source = write_model(kind, tmp_path / "model", ["a", "b"])
    run = trainer(source, write_rows(tmp_path / "a.jsonl", rows()), f"precision={precision}", "optimizer.lr=3e-3")
    fit(run)
    best = tmp_path / "best"
    run.recipe.export(run.model.eval(), run.datasets, best)
    texts = [row["text"] for row in rows()[:6]]
    batch = run.datasets.train.batch([SampleId(index, None) for index in range(6)])
    with torch.no_grad():
        own = run.recipe.loss(run.model, batch).predictions
    theirs = logits(best, texts, truncation=True).softmax(1)
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
    classify = pipeline("text-classification", model=str(best), device="cpu")
    found = classify(texts, truncation=True, batch_size=3)
    assert [row["label"] for row in found] == [CLASSES[index] for index in theirs.argmax(1)]
    assert read_config(best / "config.json")["label2id"] == {"bad": 0, "good": 1, "meh": 2}


def test_a_decoder_that_joins_pairs_with_nothing_says_so(tmp_path: Path) -> None:
    source = write_model("qwen3", tmp_path / "model")
    pairs = write_rows(tmp_path / "a.jsonl", [row | {"other": row["text"]} for row in rows()])
    run = trainer(source, pairs, "data.text_column=text", "data.pair_column=other")
    assert "joined with nothing between them" in run.datasets.description


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_are_encoded_as_transformers_encodes_them(kind: str, tmp_path: Path) -> None:
    """BERT is told which text a token is of; RoBERTa has one type."""
    source = write_model(kind, tmp_path / "model", ["0", "1"], type_vocab_size=2 if kind == "bert" else 1)
    pairs = [{"a": sentence(n, 3 + n % 5), "b": sentence(n + 1, 2 + n % 40), "label": n % 2} for n in range(40)]
    name = write_rows(tmp_path / "pairs.jsonl", pairs)
    with pytest.raises(UserError, match="2 columns of texts, a, b;") as refused:
        trainer(source, name)
    assert refused.value.remedies[-1] == "data.text_column=a data.pair_column=b"
    run = trainer(source, name, *refused.value.remedies[-1].split())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for index, row in ((0, 0), (1, 1), (30, 32)):  # of each class the tenth is kept for validation
        batch = run.datasets.train.batch([SampleId(index, None)])
        real = batch["mask"][0].bool()
        texts = (pairs[row]["a"], pairs[row]["b"])
        expected = tokenizer(*texts, truncation="longest_first", max_length=32, return_token_type_ids=True)
        assert batch["tokens"][0][real].tolist() == expected["input_ids"]
        assert ("types" in batch) == (kind == "bert")
        if "types" in batch:
            assert batch["types"][0][real].tolist() == expected["token_type_ids"]
    assert "cut to 32 tokens" in run.datasets.description
    assert "with nothing between" not in run.datasets.description
    run.recipe.export(run.model.eval(), run.datasets, tmp_path / "best")
    saved = AutoTokenizer.from_pretrained(tmp_path / "best")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best").eval()
    given = saved(*texts, truncation=True, return_tensors="pt")
    with torch.no_grad():
        own = run.recipe.loss(run.model, batch).predictions
        torch.testing.assert_close(own, model(**given).logits.softmax(1), rtol=1e-5, atol=1e-5)


NEW = ("recipe.model_type=bert", *(f"recipe.config.{key}={value}" for key, value in SHAPE.items()))


def test_a_run_of_a_new_model_is_resumed_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own tokenizer. Stopped and resumed it has the same bits as never stopped."""
    name = write_rows(tmp_path / "a.jsonl", rows())
    job = ("recipe=text_classifier", *NEW, name, "data.vocab_size=300", "batch_size=4", "eval_samples=6", "device=cpu")
    runs = (
        *job,
        "schedule=constant",
        "schedule.warmup_steps=0",
        f"output_dir={tmp_path}",
        "tracking=local",
        "deterministic=true",
        "precision=bf16",
    )
    whole = train(compose(*runs, "run_name=whole", "steps=4"))
    train(compose(*runs, "run_name=parts", "steps=2"))
    train(compose(*runs, "run_name=parts", "steps=4", "resume=auto"))
    states = [load(tmp_path / run / "checkpoints", 4).tensors() for run in ("whole", "parts")]
    assert same_bits(*states)
    best = tmp_path / "whole" / "best"
    for given, more in ((best.parent, []), (shutil.copytree(best, tmp_path / "exported"), [name, "data=hub"])):
        evaluate([f"run={given}", "precision=fp32", *more])
        assert {*CLASSES, "mcc"} <= {*capsys.readouterr().out.split()}
        assert (given / "evaluation" / "confusion.csv").is_file()
    (found,) = pipeline("text-classification", model=str(best), device="cpu")("w1 w2")
    assert found["label"] in CLASSES
    assert {"valid/accuracy", "valid/f1_macro", "valid/mcc"} <= whole.summary["final"].keys()


FORMS: dict[str, tuple[list[Any], tuple[str, ...], list[str], list[Any]]] = {
    "words": (["b", "a", "b", "c"], (), ["a", "b", "c"], [1, 0, 1, 2]),
    "numbers": ([10, 9, 10, 9], (), ["9", "10"], [1, 0, 1, 0]),
    "yes or no": ([True, False, True, False], (), ["False", "True"], [1, 0, 1, 0]),
    "lists": ([["x"], [], ["y", "x"], ["y"]], (), ["x", "y"], [[1, 0], [0, 0], [1, 1], [0, 1]]),
}


@pytest.mark.parametrize(("values", "options", "classes", "labels"), FORMS.values(), ids=FORMS)
def test_labels_have_several_forms(
    values: list[Any], options: tuple[str, ...], classes: list[str], labels: list[Any], tmp_path: Path
) -> None:
    given = [{"text": sentence(n, 3), "label": values[n % 4]} for n in range(40)]
    name = write_rows(tmp_path / "data" / "train.jsonl", given).rpartition("/")[0]
    write_rows(tmp_path / "data" / "validation.jsonl", given[:4])
    datasets = trainer(*NEW, "data.tokenizer=bytes", name, *options).datasets
    assert datasets.classes == classes
    batch = datasets.train.batch([SampleId(index, None) for index in range(4)])
    assert batch["label"].tolist() == labels
    assert batch["label"].dtype == (torch.float32 if datasets.multi_label else torch.int64)


def test_several_labels_train_with_the_loss_of_transformers(tmp_path: Path) -> None:
    source = write_model("distilbert", tmp_path / "model", ["toxic", "insult"])
    given = [{"text": sentence(n, 1 + n % 9), "toxic": n % 2, "insult": int(n % 3 == 0)} for n in range(60)]
    run = trainer(source, write_rows(tmp_path / "a.jsonl", given), "data.label_column=[toxic,insult]")
    batch = run.datasets.train.batch([SampleId(index, None) for index in range(8)])
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    expected.config.problem_type = "multi_label_classification"
    ids = {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "labels": batch["label"]}
    with torch.no_grad():
        output = run.recipe.loss(run.model.eval(), batch)
        torch.testing.assert_close(output.loss_sum / 8, expected(**ids).loss, rtol=1e-6, atol=1e-6)
    right = ((output.predictions > 0.5) == batch["label"].bool()).all(1).sum()
    assert output.metric_sums["exact_match"] == right
    fit(run)
    assert run.evaluate().keys() >= {"loss", "mAP", "f1_macro", "exact_match"}
    run.recipe.export(run.model.eval(), run.datasets, tmp_path / "best")
    with torch.no_grad():
        shares = run.recipe.loss(run.model, batch).predictions[0]
    classify = pipeline("text-classification", model=str(tmp_path / "best"), top_k=None, device="cpu")
    found = {row["label"]: row["score"] for row in classify([given[0]["text"]])[0]}
    assert [found[name] for name in ("toxic", "insult")] == pytest.approx(shares.tolist(), abs=1e-5)


def test_metrics_are_those_of_scikit_learn(tmp_path: Path) -> None:
    run = trainer(*NEW, "data.tokenizer=bytes", write_rows(tmp_path / "a.jsonl", rows()))
    rng = np.random.default_rng(0)
    labels, shares = rng.integers(0, 3, 50), rng.random((50, 3))
    metrics = Metrics(run.recipe, run.datasets, None, torch.device("cpu"))
    metrics.update(LossOutput(torch.zeros(()), {}, torch.from_numpy(shares), torch.from_numpy(labels)))
    found, given = metrics.values(run.world), shares.argmax(1)
    assert found["f1_macro"] == pytest.approx(sklearn.metrics.f1_score(labels, given, average="macro"), abs=1e-6)
    assert found["mcc"] == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, given), abs=1e-6)


@pytest.mark.parametrize(
    ("before", "kept", "said"),
    [
        (CLASSES, True, "its head is kept, which has these classes"),
        (["LABEL_0", "LABEL_1", "LABEL_2"], True, "whose outputs have no names"),
        (["x", "y", "z"], False, "with a new output layer: its classes are x, y, z"),
        (["x", "y"], False, "with a new output layer"),
    ],
    ids=["same", "unnamed", "others", "fewer"],
)
def test_a_head_is_kept_for_the_same_classes(before: list[str], kept: bool, said: str, tmp_path: Path) -> None:
    source = write_model("roberta", tmp_path / "model", before)
    run = trainer(source, write_rows(tmp_path / "a.jsonl", rows()))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").state_dict()
    own = run.model.state_dict()
    assert torch.equal(own["classifier.dense.weight"], theirs["classifier.dense.weight"])
    same = own["classifier.out_proj.weight"].shape == theirs["classifier.out_proj.weight"].shape
    assert (same and torch.equal(own["classifier.out_proj.weight"], theirs["classifier.out_proj.weight"])) == kept
    assert any(said in decision.why for decision in run.plan.decisions)


def test_a_model_of_masked_tokens_gets_a_head_and_a_pooler(tmp_path: Path) -> None:
    source = write_model("bert", tmp_path / "model", cls=AutoModelForMaskedLM)
    run = trainer(source, write_rows(tmp_path / "a.jsonl", rows()))
    assert run.model.classifier.out_features == 3
    assert any("a new head for bad, good, meh" in decision.why for decision in run.plan.decisions)


def test_a_run_begins_with_another_ones_body(tmp_path: Path) -> None:
    """A new output layer where the classes are others."""
    options = (*NEW, "data.vocab_size=300", f"output_dir={tmp_path}", "tracking=local", "steps=2", "batch_size=4")
    job = ("recipe=text_classifier", "device=cpu", "eval_samples=4", *options)
    train(compose(*job, write_rows(tmp_path / "a.jsonl", rows()), "run_name=first"))
    other = [row | {"label": "xy"[number % 2]} for number, row in enumerate(rows())]
    for name, data in (("same", rows()), ("others", other)):
        given = write_rows(tmp_path / f"{name}.jsonl", data)
        begun = trainer(f"init_from={tmp_path}/first", given)
        weights = load_file(tmp_path / "first" / "best" / "model.safetensors")
        own = begun.model.state_dict()
        body = "bert.encoder.layer.0.output.dense.weight"
        assert torch.equal(own[body], weights[body])
        assert begun.model.config.num_labels == len(begun.datasets.classes) == (3 if name == "same" else 2)
        assert (name == "same") == (own["classifier.weight"].shape == weights["classifier.weight"].shape)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("kind", ["roberta", "qwen3"])
def test_adapters_are_trained_beside_the_whole_head(kind: str, tmp_path: Path) -> None:
    source = write_model(kind, tmp_path / "model", ["a", "b"])
    run = trainer(source, write_rows(tmp_path / "a.jsonl", rows()), "recipe.lora.rank=2", "optimizer.lr=0.01")
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    heads = {name for name in trained if ".lora_" not in name}
    assert heads == ({"score.weight"} if kind == "qwen3" else {
        f"classifier.{part}.{name}" for part in ("dense", "out_proj") for name in ("weight", "bias")
    })  # fmt: skip
    fit(run)
    best, texts = tmp_path / "best", [row["text"] for row in rows()[:4]]
    run.recipe.export(run.model.eval(), run.datasets, best)
    base = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", num_labels=3, ignore_mismatched_sizes=True
    )
    adapted = PeftModel.from_pretrained(base, str(best / "adapter")).eval()
    tokenizer = AutoTokenizer.from_pretrained(best)
    with torch.no_grad():
        found = torch.cat([adapted(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(found, logits(best, texts), rtol=1e-4, atol=1e-5)


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no labels": ({"label": None}, (), "no columns are of type label; its columns are text"),
    "fractions": ({"label": lambda n: n / 7}, (), "data.label_column=label has fractions, as for a regression"),
    "a class a row": ({"label": lambda n: f"c{n}"}, (), "has 40 values in 40 rows, which are no classes"),
    "one class": ({"label": "same"}, (), "of the training texts all have the label same"),
    "no texts": ({"text": None}, (), "no columns are of type text"),
    "some have none": ({"label": lambda n: "ab"[n % 2] if n % 5 else None}, (), "row 0 has no label .8 of 40"),
    "some numbers are missing": ({"label": lambda n: n % 3 if n % 5 else None}, (), "row 0 has no label .8 of 40"),
    "not 0 or 1": ({"label": lambda n: n % 3}, ("data.label_column=[label]",), "row 2 has 2 in label, which is not 0"),
    "characters": ({}, ("data.tokenizer=chars",), "knows the characters of these texts alone"),
    "no such column": ({}, ("data.label_column=stars",), "stars is not a column of type label"),
    "label as text": (
        {"label": lambda n: "ab"[n % 2]}, ("data.pair_column=label",), "label is not a column of type pair",
    ),
    "chats": (
        {"text": None, "label": lambda n: "ab"[n % 2], "messages": [{"role": "user", "content": "hello"}]}, (),
        "no columns are of type text; its columns are messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_trained_on_is_named(
    columns: dict[str, Any], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    given = []
    for number in range(40):
        row = {"text": sentence(number, 3), "label": number % 2} | {
            name: value(number) if callable(value) else value for name, value in columns.items()
        }
        given.append({name: value for name, value in row.items() if not (value is None and columns.get(name) is None)})
    if columns.get("label") is not None and callable(columns["label"]):
        given = [row | {"label": row.get("label")} for row in given]
    with pytest.raises(UserError, match=message):
        trainer(*NEW, "data.tokenizer=bytes", write_rows(tmp_path / "a.jsonl", given), *options)


def test_splits_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    name = write_rows(tmp_path / "data" / "train.jsonl", rows()).rpartition("/")[0]
    write_rows(tmp_path / "data" / "validation.jsonl", [{"text": "w1", "label": "unseen"}, rows()[0]])
    with pytest.raises(UserError, match="row 0 has the label 'unseen', which no row of the training split has"):
        trainer(*NEW, "data.tokenizer=bytes", name)


def test_the_model_has_to_be_one_that_classifies(tmp_path: Path) -> None:
    name = write_rows(tmp_path / "a.jsonl", rows())
    for options, message in (
        ((), "none is named: set init_from"),
        (("recipe.model_type=berd",), "did you mean 'bert'"),
        (("recipe.model_type=vit",), "type vit does not classify texts"),
        (("recipe.model_type=t5",), "takes pretrained weights"),
        ((*NEW, "recipe.config.num_hidden_layer=2"), "no option of .*num_hidden_layers"),
        ((*NEW, "recipe.config.n_layer=2"), "no option of .*its sizes are .*num_hidden_layers"),
        ((*NEW, "recipe.context=1024"), "longer than the .*512"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(name, "data.tokenizer=bytes", *options)
    with pytest.raises(UserError, match="reads texts with labels, and data=python_docs has none"):
        trainer(*NEW, "data=python_docs")


def test_a_model_that_reads_padding_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_rows(tmp_path / "a.jsonl", rows())
    trainer(write_model("bert", tmp_path / "bert"), data)
    assert "padding" not in caplog.text
    sizes = ("d_model=32", "n_layer=2", "n_head=2", "d_inner=48", "initializer_range=0.2")
    xlnet = [f"recipe.config.{size}" for size in sizes]
    trainer("recipe.model_type=xlnet", data, "data.tokenizer=bytes", *xlnet)
    assert "XLNetForSequenceClassification reads the padding after a text" in caplog.text


def test_synthetic_texts_fill_the_context() -> None:
    run = trainer(*NEW, "data=synthetic", "data.classes=3", "data.vocab_size=90", "recipe.context=24")
    batch = run.datasets.train.batch([SampleId(0, None), SampleId(1, None)])
    assert batch["mask"].all()
    assert batch["tokens"].shape == (2, 24)
    fit(run)
