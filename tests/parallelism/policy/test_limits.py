"""Shapes of models: presets, TOML tables, Hugging Face's config.json."""

from __future__ import annotations

import pytest

from outlast.errors import ConfigError
from outlast.parallelism.policy.limits import PRESETS, ModelLimits, model_of_hugging_face, model_of_table

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
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt3-345m", 345),
        ("gpt3-857m", 857),
        ("gpt3-1.7b", 1700),
        ("gpt3-7.1b", 7100),
        ("gpt3-175b", 175_000),
        ("bert-large", 340),
        ("mixtral-8x7b", 46_700),
    ],
)
def test_presets_have_the_size_of_their_name(name: str, millions: int) -> None:
    assert PRESETS[name].name == name
    assert PRESETS[name].parameters / 1e6 == pytest.approx(millions, rel=0.035)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt3-345m", (24, 1024, 16, 1024, 51200)),
        ("gpt3-857m", (20, 1792, 16, 2048, 51200)),
        ("gpt3-1.7b", (24, 2304, 24, 2048, 51200)),
        ("gpt3-7.1b", (34, 4096, 32, 2048, 51200)),
        ("gpt3-175b", (96, 12288, 96, 2048, 51200)),
        ("bert-large", (24, 1024, 16, 512, 30720)),
    ],
)
def test_presets_have_the_shapes_of_their_sources(name: str, shape: tuple[int, ...]) -> None:
    assert PRESETS[name] == ModelLimits(name, *shape)


def test_the_preset_of_mixtral() -> None:
    """The sequence is that of Megatron-LM's example, not the most that the model can take."""
    config = model_of_hugging_face({**MIXTRAL, "max_position_embeddings": 4096}, "mixtral-8x7b")
    assert PRESETS["mixtral-8x7b"] == config


def test_parameters_of_a_dense_model_are_counted_by_hand() -> None:
    model = ModelLimits("m", 2, 8, 4, 16, 100, kv_heads=2, ffn=10)
    # queries 8x8, keys and values 2 x 8x4, output 8x8, norms 4 x 8
    assert model.attention == 64 + 2 * 32 + 64 + 32
    assert model.expert == 2 * 8 * 10
    assert model.embedding == 800
    assert model.parameters == 2 * (224 + 160) + 800


def test_parameters_of_a_gated_untied_model_with_experts() -> None:
    model = ModelLimits("m", 2, 8, 4, 16, 100, ffn=10, experts=4, gated=True, tied=False, head_size=3)
    assert model.attention == 4 * 8 * 12 + 32 + 8 * 4
    assert model.expert == 3 * 8 * 10
    assert model.experts_per_token == 2
    assert model.parameters == 2 * (448 + 4 * 240) + 1600


def test_what_is_left_out_follows_from_the_rest() -> None:
    model = ModelLimits("m", 2, 8, 4, 16, 100)
    assert (model.kv_heads, model.ffn, model.head_size, model.experts_per_token) == (4, 32, 2, 0)
    assert ModelLimits("m", 2, 8, 1, 16, 100).head_size == 8


def test_a_config_of_hugging_face_is_read() -> None:
    model = model_of_hugging_face(MIXTRAL, "config.json")
    wanted = ModelLimits(
        "config.json", 32, 4096, 32, 32768, 32000, 8, 14336, 8, 2, gated=True, tied=False, head_size=128
    )
    assert model == wanted


def test_a_config_of_gpt2_is_read() -> None:
    model = model_of_hugging_face(GPT2, "config.json")
    assert model == ModelLimits("config.json", 12, 768, 12, 1024, 50257)
    assert model.tied
    assert not model.gated


def test_the_text_part_of_a_config_counts() -> None:
    nested = {"vision_config": {"hidden_size": 1}, "text_config": GPT2, "tie_word_embeddings": False}
    assert model_of_hugging_face(nested, "c") == ModelLimits("c", 12, 768, 12, 1024, 50257, tied=False)
    own = {**nested, "text_config": {**GPT2, "tie_word_embeddings": True, "model_type": "gemma3_text"}}
    assert model_of_hugging_face(own, "c") == ModelLimits("c", 12, 768, 12, 1024, 50257, gated=True)


def test_missing_fields_of_a_config_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_hugging_face({"vocab_size": None, "n_head": 4, "hidden_size": 8}, "config.json")
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "num_hidden_layers or n_layer",
        "max_position_embeddings or n_positions",
        "vocab_size",
    ]
    assert "transformer layers" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_hidden_layers": 32.0}, "num_hidden_layers: a whole number is expected, 32.0 was found"),
        ({"num_hidden_layers": True}, "num_hidden_layers: a whole number"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: latent attention"),
        ({"text_config": 3}, "text_config: an object"),
        ({"num_key_value_heads": 5}, "kv_heads: 32 heads cannot share 5"),
        ({"num_experts_per_tok": 9}, "experts_per_token: 9 of 8 experts"),
        ({"hidden_size": 0}, "hidden: 1 to 100000000 is expected, 0 was found"),
        ({"num_attention_heads": -1}, "heads: 1 to 10000 is expected"),
        ({"num_hidden_layers": 10_001}, "layers: 1 to 10000 is expected, 10001 was found"),
        ({"num_key_value_heads": -8}, "kv_heads: 0 to 10000 is expected, -8 was found"),
        ({"vocab_size": 100_000_001}, "vocabulary: 1 to 100000000 is expected"),
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        model_of_hugging_face({**MIXTRAL, **change}, "config.json")


def test_the_largest_model_is_taken() -> None:
    size = 100_000_000
    model = ModelLimits("m", 10_000, size, 10_000, size, size, ffn=size, experts=10_000)
    assert model.head_size == 10_000


def test_a_table_is_read() -> None:
    table = {"layers": 2, "hidden": 8, "heads": 4, "sequence": 16, "vocabulary": 100, "tied": False}
    assert model_of_table(table, "m.toml") == ModelLimits("m.toml", 2, 8, 4, 16, 100, tied=False)
    assert model_of_table({**table, "name": "mine"}, "m.toml").name == "mine"


def test_what_is_wrong_in_a_table_is_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_table({"layer": 2, "hidden": "8", "heads": 4, "sequence": 16, "tied": 1}, "m.toml")
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "layer",
        "layers",
        "vocabulary",
        "hidden",
        "tied",
    ]
    assert "known are name, layers" in caught.value.problems[0]
    assert "type int is expected, '8' was found" in caught.value.problems[3]
