"""What a transformer's shape allows: heads, layers and experts limit how a job can be divided.

A model is one of :data:`PRESETS`, a table of a TOML file, or the ``config.json`` of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from outlast.errors import ConfigError

# Names of a Hugging Face config.json by the field that they give, the current ones before GPT-2's.
_HUGGING_FACE = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "sequence": ("max_position_embeddings", "n_positions"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "head_size": ("head_dim",),
}
_NEEDED = ("layers", "hidden", "heads", "sequence", "vocabulary")
# More is refused, as a mistake that would be planned for very long.
_MOST = {
    **dict.fromkeys(("layers", "heads", "kv_heads", "experts", "experts_per_token"), 10_000),
    **dict.fromkeys(("hidden", "sequence", "vocabulary", "ffn", "head_size"), 100_000_000),
}
_GATED = ("gemma", "cohere")  # model types whose activation is another one, and gated


@dataclass(frozen=True)
class ModelLimits:
    """The shape of a transformer.

    Args:
        name: for messages.
        layers: transformer layers.
        hidden: width.
        heads: attention heads of a layer.
        sequence: tokens of a sample.
        vocabulary: tokens that there are.
        kv_heads: heads of keys and values; 0: as many as ``heads``.
        ffn: width within the feed-forward part, of one expert where there are experts; 0: 4 times ``hidden``.
        experts: of each layer; 0: the feed-forward part has none.
        experts_per_token: of these for each token; 0: 2 where there are experts.
        head_size: width of a head; 0: ``hidden / heads``.
        gated: the feed-forward part has three matrices (SwiGLU), not two.
        tied: the output layer uses the embedding's weights.

    Raises:
        ConfigError: names each field that is wrong.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    experts: int = 0
    experts_per_token: int = 0
    head_size: int = 0
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        fill = {
            "kv_heads": self.heads,
            "ffn": 4 * self.hidden,
            "experts_per_token": 2 if self.experts else 0,
            "head_size": self.hidden // max(1, self.heads),
        }
        for field, default in fill.items():
            if not getattr(self, field):
                object.__setattr__(self, field, default)
        problems = []
        for field, most in _MOST.items():
            found, least = getattr(self, field), 1 if field in _NEEDED else 0
            if not least <= found <= most:
                problems.append(f"{field}: {least} to {most} is expected, {found} was found")
        if not problems and self.heads % self.kv_heads:
            problems.append(f"kv_heads: {self.heads} heads cannot share {self.kv_heads}")
        if self.experts_per_token > self.experts:
            problems.append(f"experts_per_token: {self.experts_per_token} of {self.experts} experts")
        if problems:
            raise ConfigError(self.name, tuple(problems))

    @property
    def attention(self) -> int:
        """Parameters of a layer that all tokens use besides the feed-forward part: attention and norms."""
        projections = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return projections + 4 * self.hidden + self.hidden * self.experts

    @property
    def expert(self) -> int:
        """Parameters of one expert, or of a layer's feed-forward part."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model; learned positions and biases, less than 1 %, are left out."""
        layer = self.attention + max(1, self.experts) * self.expert
        return self.layers * layer + self.embedding * (1 if self.tied else 2)


def model_of_table(table: Mapping[str, Any], source: str) -> ModelLimits:
    """Return the model of a TOML file's table, whose keys are the fields of :class:`ModelLimits`.

    Raises:
        ConfigError: names the fields that are missing, unknown or of another type.
    """
    kinds = {one.name: one.type for one in fields(ModelLimits)}
    problems = [f"{key}: unknown; known are {', '.join(kinds)}" for key in table if key not in kinds]
    problems += [f"{name}: missing; {_meaning(name)}" for name in _NEEDED if name not in table]
    for key, value in table.items():
        if key in kinds and type(value).__name__ != kinds[key]:
            problems.append(f"{key}: type {kinds[key]} is expected, {value!r} was found")
    if problems:
        raise ConfigError(source, tuple(problems))
    return ModelLimits(**{"name": source, **table})


def model_of_hugging_face(document: Mapping[str, Any], source: str) -> ModelLimits:
    """Return the model of a ``config.json``; that of the text where it has several parts.

    Whether the feed-forward part is gated is not written there: it is where the activation is ``silu``.

    Raises:
        ConfigError: names the fields that are missing or are no whole numbers; or the model's attention is
            of a kind whose size is not known here.
    """
    text = document.get("text_config", document)
    problems, found = [], {}
    if not isinstance(text, Mapping):
        raise ConfigError(source, (f"text_config: an object is expected, {text!r} was found",))
    if text.get("kv_lora_rank"):
        raise ConfigError(source, ("kv_lora_rank: latent attention (MLA) is not modelled",))
    for field, names in _HUGGING_FACE.items():
        name = next((one for one in names if text.get(one) is not None), "")
        if name and type(text[name]) is not int:
            problems.append(f"{name}: a whole number is expected, {text[name]!r} was found")
        elif name:
            found[field] = text[name]
        elif field in _NEEDED:
            problems.append(f"{' or '.join(names)}: missing; {_meaning(field)}")
    if problems:
        raise ConfigError(source, tuple(problems))
    kind = str(text.get("model_type", ""))
    tied = text.get("tie_word_embeddings", document.get("tie_word_embeddings", True))
    gated = text.get("hidden_act") == "silu" or kind.startswith(_GATED)
    return ModelLimits(name=source, gated=gated, tied=bool(tied), **found)


def _meaning(field: str) -> str:
    """Return what a field means, of the docstring of :class:`ModelLimits`."""
    lines = (ModelLimits.__doc__ or "").splitlines()
    prefix = f"{field}: "
    return next((line.strip()[len(prefix) :] for line in lines if line.strip().startswith(prefix)), field)


def _gpt3(name: str, layers: int, hidden: int, heads: int, sequence: int = 2048) -> ModelLimits:
    return ModelLimits(name, layers, hidden, heads, sequence, vocabulary=51200)


# Vocabularies are padded as by Megatron-LM. Sources of the shapes: 345M Megatron-LM's text generation server;
# 1.7B and 175B arXiv 2104.04473, table 1; BERT and Mixtral Megatron-LM's examples. Of 857M and 7.1B
# Megatron_GpuFailureRecoveryMechanism, which names these sizes, publishes no shape: these are ours.
PRESETS = {
    model.name: model
    for model in (
        _gpt3("gpt3-345m", 24, 1024, 16, 1024),
        _gpt3("gpt3-857m", 20, 1792, 16),
        _gpt3("gpt3-1.7b", 24, 2304, 24),
        _gpt3("gpt3-7.1b", 34, 4096, 32),
        _gpt3("gpt3-175b", 96, 12288, 96),
        ModelLimits("bert-large", 24, 1024, 16, 512, 30720),
        ModelLimits("mixtral-8x7b", 32, 4096, 32, 4096, 32000, 8, 14336, 8, 2, gated=True, tied=False),
    )
}
