"""Shapes of models: presets, TOML tables, Hugging Face's config.json."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.errors import ConfigError
from outlast.parallelism.policy.limits import PRESETS, ModelLimits, model_of_hugging_face, model_of_table
from tests.parallelism.policy.builders import model

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXED = ModelLimits("c", 32, 4096, 32, 32768, 32000, 8, 14336, 8, 2, gated=True, tied=False, head_size=128)
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
NESTED = {"vision_config": {"hidden_size": 1}, "text_config": GPT2, "tie_word_embeddings": False}
GEMMA = {**NESTED, "text_config": {**GPT2, "tie_word_embeddings": True, "model_type": "gemma3_text"}}


@pytest.mark.parametrize(
    ("name", "millions", "shape"),
    [
        ("gpt3-345m", 345, (24, 1024, 16, 1024, 51200)),
        ("gpt3-857m", 857, (20, 1792, 16, 2048, 51200)),
        ("gpt3-1.7b", 1700, (24, 2304, 24, 2048, 51200)),
        ("gpt3-7.1b", 7100, (34, 4096, 32, 2048, 51200)),
        ("gpt3-175b", 175_000, (96, 12288, 96, 2048, 51200)),
        ("bert-large", 340, (24, 1024, 16, 512, 30720)),
        ("mixtral-8x7b", 46_700, (32, 4096, 32, 4096, 32000, 8, 14336, 8, 2, 0, True, False)),
    ],
)
def test_presets_have_the_shapes_of_their_sources_and_the_size_of_their_name(
    name: str, millions: int, shape: tuple[Any, ...]
) -> None:
    assert PRESETS[name] == ModelLimits(name, *shape)
    assert PRESETS[name].parameters / 1e6 == pytest.approx(millions, rel=0.035)


def test_parameters_are_counted_by_hand() -> None:
    dense = model(layers=2, kv_heads=2, ffn=10)
    assert dense.attention == 64 + 2 * 32 + 64 + 32  # queries, keys and values, output, norms
    assert (dense.expert, dense.embedding) == (2 * 8 * 10, 800)
    assert dense.parameters == 2 * (224 + 160) + 800
    gated = model(layers=2, ffn=10, experts=4, gated=True, tied=False, head_size=3)
    assert gated.attention == 4 * 8 * 12 + 32 + 8 * 4
    assert (gated.expert, gated.experts_per_token) == (3 * 8 * 10, 2)
    assert gated.parameters == 2 * (448 + 4 * 240) + 1600


def test_what_is_left_out_follows_from_the_rest() -> None:
    found = model()
    assert (found.kv_heads, found.ffn, found.head_size, found.experts_per_token) == (4, 32, 2, 0)
    assert model(heads=1).head_size == 8


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (MIXTRAL, MIXED),
        (GPT2, ModelLimits("c", 12, 768, 12, 1024, 50257)),
        (NESTED, ModelLimits("c", 12, 768, 12, 1024, 50257, tied=False)),
        (GEMMA, ModelLimits("c", 12, 768, 12, 1024, 50257, gated=True)),
    ],
    ids=["mixtral", "gpt2", "text part", "text part's own"],
)
def test_a_config_of_hugging_face_is_read(config: dict[str, Any], found: ModelLimits) -> None:
    assert model_of_hugging_face(config, "c") == found


def test_missing_fields_of_a_config_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_hugging_face({"vocab_size": None, "n_head": 4, "hidden_size": 8}, "config.json")
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "num_hidden_layers or n_layer",
        "max_position_embeddings or n_positions",
        "vocab_size",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 32.0}, r"num_hidden_layers.*32\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"text_config": 3}, "text_config.*3"),
        ({"num_key_value_heads": 5}, "kv_heads.*32.*5"),
        ({"num_experts_per_tok": 9}, "experts_per_token.*9.*8"),
        ({"hidden_size": 0}, "hidden.*1.*100000000.*0"),
        ({"num_attention_heads": -1}, "heads.*1.*10000.*-1"),
        ({"num_hidden_layers": 10_001}, "layers.*1.*10000.*10001"),
        ({"num_key_value_heads": -8}, "kv_heads.*0.*10000.*-8"),
        ({"vocab_size": 100_000_001}, "vocabulary.*1.*100000000.*100000001"),
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_of_hugging_face({**MIXTRAL, **change}, "config.json")


def test_the_largest_model_is_taken() -> None:
    size = 100_000_000
    found = ModelLimits("m", 10_000, size, 10_000, size, size, ffn=size, experts=10_000)
    assert found.head_size == 10_000


def test_a_table_is_read_and_all_that_is_wrong_in_it_is_named() -> None:
    table = {"layers": 2, "hidden": 8, "heads": 4, "sequence": 16, "vocabulary": 100, "tied": False}
    assert model_of_table(table, "m.toml") == model(name="m.toml", layers=2, tied=False)
    assert model_of_table({**table, "name": "mine"}, "m.toml").name == "mine"
    with pytest.raises(ConfigError) as caught:
        model_of_table({"layer": 2, "hidden": "8", "heads": 4, "sequence": 16, "tied": 1}, "m.toml")
    names = [line.partition(":")[0] for line in caught.value.problems]
    assert names == ["layer", "layers", "vocabulary", "hidden", "tied"]
    assert "name, layers" in caught.value.problems[0]
    assert "'8'" in caught.value.problems[3]
