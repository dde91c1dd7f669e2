"""Memory that the fullest rank of a layout needs.

Parameters, gradients and Adam's state are counted as in Megatron-LM's ``theoretical_memory_usage.py`` and its
page "Distributed Optimizer": 18 bytes a parameter (bf16 parameters, fp32 gradients, fp32 parameters and two
moments), or 6 + 12/d where d ranks share the optimizer's state. Activations are those of Korthikanti et al.
(arXiv 2205.05198, table 2 with sequence parallelism and selective recomputation): 34 bytes for each token and
unit of width in a layer whose feed-forward part is four times as wide, which are 18 for attention, norms and
masks, and 4 for each unit of the feed-forward width. A gated one keeps three tensors instead of two, hence 6.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.limits import ModelLimits

WEIGHTS = 6  # bytes a parameter that every rank has: bf16 parameters, fp32 gradients
STATE = 12  # bytes a parameter that ranks may share: fp32 parameters, two moments
USABLE = 0.95  # of a device's memory; ours: contexts, communication buffers and fragments take the rest


@dataclass(frozen=True)
class Training:
    """What decides how much memory a step needs besides model and layout.

    Args:
        micro_batch: samples that a rank computes at a time.
        recompute: activations are computed again in the backward pass, and only a layer's input is kept.
        sharded_optimizer: data-parallel ranks share the optimizer's state (Megatron-LM's distributed
            optimizer, ZeRO 1). Parameters that are shared, too (FSDP, ZeRO 3), need less than is said here.
    """

    micro_batch: int = 1
    recompute: bool = False
    sharded_optimizer: bool = True


@dataclass(frozen=True)
class RankParameters:
    """Parameters of the fullest rank of a layout.

    Args:
        dense: that all data-parallel ranks have alike.
        experts: of the experts that this rank has.
    """

    dense: float
    experts: float


def parameters_of_rank(model: ModelLimits, layout: Layout) -> RankParameters:
    """Return the parameters of the fullest rank: a stage's layers and an embedding, divided by tp.

    The last stage has the output layer or another copy of the embedding; a single stage has both.
    """
    layers = model.layers / layout.pp
    dense, experts = model.attention * layers, 0.0
    if model.experts:
        experts = model.expert * model.experts / layout.ep * layers
    else:
        dense += model.expert * layers
    dense += model.embedding * (2 if layout.pp == 1 and not model.tied else 1)
    return RankParameters(dense / layout.tp, experts / layout.tp)


@dataclass(frozen=True)
class Footprint:
    """Bytes that the fullest rank of a shape needs, whatever the number of data-parallel copies.

    Args:
        fixed: needed in any case.
        in_flight: activations of as many micro-batches as the pipeline is deep, where a copy has so many.
        depth: of the pipeline, in micro-batches.
        shared: optimizer state that the data-parallel copies share.
    """

    fixed: float
    in_flight: float
    depth: int
    shared: float

    def needed(self, dp: int, micro_batches: int) -> float:
        """Return the bytes with so many copies, the busiest of which has so many micro-batches a step."""
        return self.fixed + self.in_flight * min(1.0, micro_batches / self.depth) + self.shared / dp


def footprint(model: ModelLimits, layout: Layout, training: Training, rank: RankParameters) -> Footprint:
    """Return what the fullest rank of a layout needs; its dp does not matter.

    The first stage keeps the activations of up to pp micro-batches, more in the interleaved schedule.

    Args:
        model: that is trained.
        layout: its parallelism.
        training: size of a micro-batch, recomputation, the optimizer.
        rank: the parameters of the fullest rank.
    """
    tokens = model.sequence * training.micro_batch / layout.cp
    per_ffn = (6 if model.gated else 4) * max(1, model.experts_per_token)
    layer = tokens * (18 * model.hidden + per_ffn * model.ffn)
    kept = 2 * tokens * model.hidden if training.recompute else layer
    stage = (kept * model.layers + (8 + model.hidden) * tokens * layout.pp) / layout.tp
    once = layer if training.recompute else 0.0
    if layout.pp == 1:
        once += 4 * tokens * (model.hidden + model.vocabulary)
    everything = rank.dense + rank.experts
    shared = STATE * (rank.dense + rank.experts * layout.ep) / layout.cp
    fixed = once / layout.tp + WEIGHTS * everything
    if not training.sharded_optimizer:
        fixed, shared = fixed + STATE * everything, 0.0
    if layout.virtual == 1:
        return Footprint(fixed, stage, layout.pp, shared)
    return Footprint(fixed + stage * (1 + (layout.pp - 1) / (layout.pp * layout.virtual)), 0.0, 1, shared)
