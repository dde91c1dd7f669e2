"""After how many steps the state is saved in memory, from what a save costs and how often faults come.

Seconds throughout. The interval is J. W. Young's (1974): the square root of twice the cost over the rate of
faults. The loss is flat around it: twice or half of it costs a quarter more.

The rate is estimated with a Gamma prior, which grows with what is seen. Each fault takes away part of the
weight of all that was before it, so that the estimate follows a change. It is not known when earlier restarts
of the job came, so only the time that this process has run counts as time without faults.
"""

from __future__ import annotations

import math

FIRST_STEPS = 10  # before anything was measured
NO_COST = 1e-3  # a save for which nobody waits still takes from the machine
FORGET = 0.65  # weight left after a fault; five faults at twelve times the rate are then followed
PRIOR_FAULTS = 0.5
PRIOR_MTBF = 21_600.0  # between Llama 3's 2.8 h at 16,384 GPUs and Meta's 7.9 h at 1,024
NORMAL_90 = 1.2815515655446004  # 90th percentile of the normal distribution


def fault_rate(restarts: int, seconds: float) -> float:
    """Return a rate of faults that is above the true one with a chance of 90 %.

    The percentile of the Gamma distribution by E. B. Wilson and M. M. Hilferty (1931): at most 2.5 % low
    with half a fault, 1 % with one.

    Args:
        restarts: of this job so far.
        seconds: since the last one.
    """
    faults, past = PRIOR_FAULTS, PRIOR_FAULTS * PRIOR_MTBF
    for _ in range(restarts):
        faults, past = FORGET * faults + 1, FORGET * past
    part = 1 / (9 * faults)
    return faults / (past + max(0.0, seconds)) * (1 - part + NORMAL_90 * math.sqrt(part)) ** 3


def best_steps(cost: float, step: float, rate: float) -> int:
    """Return the steps between two saves.

    Args:
        cost: seconds that training stands still for a save.
        step: seconds of a step.
        rate: faults a second.
    """
    return max(1, round(math.sqrt(2 * max(cost, NO_COST) / rate) / max(step, 1e-6)))
