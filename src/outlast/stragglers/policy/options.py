"""The table ``[stragglers]``: whether steps are timed, and what is done about a rank that slows the job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StragglerAction(str, Enum):
    """What is done about a rank that slows the job."""

    LOG = "log"
    REBALANCE = "rebalance"  # micro-batches, from a step on that all ranks agree on
    REPLACE = "replace"  # its node, by a spare, after the next save
    STOP = "stop"  # the job, after the next save


@dataclass(frozen=True)
class StragglerOptions:
    """The table ``[stragglers]``.

    Args:
        enabled: time the steps of all ranks and compare them.
        action: "log" says which rank is slow; "rebalance" also gives a rank that computes slowly fewer
            micro-batches of outlast.Batches, until it is as fast as its peers again; "replace" puts a spare
            in the place of its node, after the next save, if there is a second sign: a crash, a hang or a
            wrong replica there in the last 24 h, or the rank is slow, too, at a product that all ranks
            compute between two steps; "stop" ends the job after the next save (NeMo's
            stop_if_detected_straggler).
        window: steps that are compared together; more where steps are short.
        pipeline_stages: ranks of one pipeline stage are compared with each other only; stages are blocks of
            consecutive ranks, as in Megatron-LM's default order.
        tensor_parallel: consecutive ranks of one tensor-parallel group, which have equal work.
        context_parallel: ranks that share a sequence; only those with the same part of it are compared.
        expert_parallel: ranks among which experts are spread; only those with the same experts are compared.
    """

    enabled: bool = True
    action: str = StragglerAction.LOG.value
    window: int = 4
    pipeline_stages: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        actions = [one.value for one in StragglerAction]
        if self.action not in actions:
            found.append(f"action: found {self.action!r}, expected one of {', '.join(actions)}")
        parallel = ("tensor_parallel", "context_parallel", "expert_parallel")
        for name in ("window", "pipeline_stages", *parallel):
            if getattr(self, name) < 1:
                found.append(f"{name}: {getattr(self, name)} is not a positive number")
        if self.tensor_parallel > 1 == self.context_parallel == self.expert_parallel:
            found.append("tensor_parallel: has no effect without context_parallel or expert_parallel")
        if not self.enabled:
            standard = vars(StragglerOptions())
            found += [
                f"{name}: has no effect with enabled off; leave {name} out, or enable"
                for name, value in vars(self).items()
                if name != "enabled" and value != standard[name]
            ]
        return tuple(found)
