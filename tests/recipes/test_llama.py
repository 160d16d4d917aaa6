from __future__ import annotations

from tests.helpers import trainer_of

TINY = ["recipe=llama", "recipe.layers=2", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.ffn=48"]
TINY += ["recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


def test_numbers_replace_those_of_the_size_and_the_facts_say_so() -> None:
    trainer = trainer_of(*TINY)
    config = trainer.model.llama.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 32, 48)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (4, 2, 128)
    assert config.rope_parameters["rope_theta"] == 500_000
    assert (
        trainer.recipe.summary_fields(trainer.model, trainer.datasets)["size"]
        == "nano, layers 2, width 32, heads 4, kv_heads 2, ffn 48"
    )
    assert trainer.recipe.blocks(trainer.model) == list(trainer.model.llama.model.layers)
