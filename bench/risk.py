"""How well failures are predicted, and what it is worth.

    python bench/risk.py [DATA] [--only PART]

DATA is a folder with ``infinitehbd/fault_trace.json`` (InfiniteHBD-Trace, StepFun, SIGCOMM 2025, Apache-2.0)
or ``fault_trace.json.gz``, and ``acme_cdf`` (distributions of AcmeTrace, CC-BY-4.0). Parts:

- ``hazard``: trained on the first 60 % of the days, tested on the rest, one prediction for each node and day:
  AUC, precision and recall at alarm budgets, calibration.
- ``waste``: the share of time that is lost with and without prediction, for saves of 0.1, 1, 5 and 30 s.
- ``acme``: alarms of the weighted score and of ours on healthy samples drawn from Acme's distributions.
- ``overhead``: the table of Megatron_GpuFailureRecoveryMechanism by model size and gap, and ours beside it;
  it reads no DATA.

Prints JSON lines. One process, less than a minute.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from outlast.health.policy.emergency import Do, Emergency, Tier, Work, should_emergency_save, worth_it
from outlast.health.policy.fault_logs import Logs
from outlast.health.policy.fitting import Observed, Outage, fit, history_at, merged
from outlast.health.policy.hazard import DAY, DEFAULT, HOUR, HazardModel, NodeHistory, probability
from outlast.health.policy.monitor import Alert, Health, Risk
from outlast.health.policy.telemetry import DeviceSample
from outlast.health.policy.weighted import THRESHOLD, Weighted

NODES = 400  # of the trace
TRAINED = 0.6  # share of the days
BUDGETS = (0.005, 0.01, 0.02, 0.05)
COSTS = (0.1, 1.0, 5.0, 30.0)
SEED = 0


def show(part: str, **values: object) -> None:
    print(json.dumps({"part": part, **values}))


def read_trace(data: Path) -> Logs:
    logs = Logs()
    path = next(
        one for one in (data / "infinitehbd/fault_trace.json", data / "fault_trace.json.gz") if one.exists()
    )
    content = path.read_bytes()
    logs.add(gzip.decompress(content) if path.suffix == ".gz" else content)
    return logs


@dataclass(frozen=True)
class Day:
    """A prediction for a node and a day, and whether it failed then."""

    risk: float
    failed: bool


def split(logs: Logs) -> tuple[HazardModel, dict[str, list[Outage]], int, int]:
    """Return the model of the first days, all outages by node, and the first and last day of the test."""
    last = int(logs.end // DAY)
    first = int(last * TRAINED)
    known = [
        Outage(one.node, one.start, min(one.end, first * DAY), one.kind)
        for one in logs.outages
        if one.start < first * DAY
    ]
    model = fit(Observed(known, 0.0, first * DAY, NODES))
    return model, merged(logs.outages), first, last


def days(model: HazardModel, by_node: dict[str, list[Outage]], first: int, last: int) -> Iterator[Day]:
    """Yield a day of a node that is in service at its begin; one model sees only what was before."""
    for node in range(NODES):
        outages = list(by_node.values())[node] if node < len(by_node) else []
        for day in range(first, last):
            history = history_at(outages, day * DAY)
            if history is not None:
                failed = any(day * DAY < one.start <= (day + 1) * DAY for one in outages)
                yield Day(probability(model.history_within(history, DAY)), failed)


def auc(found: Sequence[Day]) -> float:
    """Return the chance that a day with a failure has a higher risk than one without; ties count half."""
    calm = sorted(one.risk for one in found if not one.failed)
    bad = [one.risk for one in found if one.failed]
    below = sum((bisect_left(calm, risk) + bisect_right(calm, risk)) / 2 for risk in bad)
    return below / (len(calm) * len(bad))


def at_budget(found: Sequence[Day], budget: float, draw: random.Random) -> tuple[float, float]:
    """Return precision and recall of the days with the highest risk; ties are drawn."""
    ordered = sorted(found, key=lambda one: (-one.risk, draw.random()))
    hit = sum(one.failed for one in ordered[: int(len(ordered) * budget)])
    return hit / max(1, int(len(ordered) * budget)), hit / sum(one.failed for one in found)


def hazard(data: Path) -> None:
    logs = read_trace(data)
    model, by_node, first, last = split(logs)
    found = list(days(model, by_node, first, last))
    base = sum(one.failed for one in found) / len(found)
    show(
        "hazard",
        node_days=len(found),
        failures=sum(one.failed for one in found),
        base=round(base, 5),
        auc=round(auc(found), 3),
    )
    draw = random.Random(SEED)
    for budget in BUDGETS:
        precision, recall = at_budget(found, budget, draw)
        show(
            "hazard budget",
            budget=budget,
            precision=round(precision, 4),
            recall=round(recall, 4),
            lift=round(precision / base, 1),
        )
    ordered = sorted(found, key=lambda one: one.risk)
    edges = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]
    for low, high in pairwise(edges):
        part = ordered[int(low * len(ordered)) : int(high * len(ordered))]
        said, true = sum(one.risk for one in part) / len(part), sum(one.failed for one in part) / len(part)
        show(
            "hazard calibration",
            quantiles=[low, high],
            predicted=round(said, 5),
            observed=round(true, 5),
            node_days=len(part),
        )
    brier = sum((one.risk - one.failed) ** 2 for one in found) / len(found)
    flat = sum((base - one.failed) ** 2 for one in found) / len(found)
    loss = -sum(math.log(max(1e-12, one.risk if one.failed else 1 - one.risk)) for one in found) / len(found)
    constant = -(base * math.log(base) + (1 - base) * math.log(1 - base))
    show(
        "hazard scores",
        brier=round(brier, 6),
        brier_of_base=round(flat, 6),
        log_loss=round(loss, 5),
        log_loss_of_base=round(constant, 5),
    )


LEAD = 60.0  # seconds between an assumed alarm and its failure
ASSUMED = ((0.1, 0.05), (0.3, 0.5), (0.6, 0.84))  # recall and precision of predictors that nobody has here


def waste(data: Path) -> None:
    """Live through the test days as one job of all nodes that saves by Young's period.

    With the hazard, the period follows the rate of all nodes at each save. Assumed predictors announce a part
    of the failures a minute before, with false alarms beside.
    """
    logs = read_trace(data)
    model, by_node, first, last = split(logs)
    begin, whole = first * DAY, (last - first) * DAY
    failures = sorted(
        one.start - begin for mine in by_node.values() for one in mine if begin <= one.start < last * DAY
    )
    gap = whole / len(failures)
    rates = hourly(model, by_node, first, last)
    scale = len(failures) / (sum(rates) / len(rates) * whole)  # the periods differ by the prediction alone
    over = round(1 / scale, 2)
    show("waste", failures=len(failures), mtbf_hours=round(gap / HOUR, 2), hazard_over_observed=over)
    for cost in COSTS:
        draw = random.Random(SEED)
        young = math.sqrt(2 * cost * gap)
        adaptive = [math.sqrt(2 * cost / (scale * rate)) for rate in rates]
        plain = lived(failures, whole, cost, [young] * len(rates), [])
        adapted = lived(failures, whole, cost, adaptive, [])
        found = {"periodic": plain, "hazard": adapted}
        for recall, precision in ASSUMED:
            told = [time - LEAD for time in failures if draw.random() < recall]
            false = [draw.uniform(0, whole) for _ in range(int(len(told) * (1 / precision - 1)))]
            period = math.sqrt(2 * cost * gap / (1 - recall))
            name = f"assumed recall {recall} precision {precision}"
            found[name] = lived(failures, whole, cost, [period] * len(rates), [*told, *false])
        show("waste", cost=cost, period=round(young), **{name: round(one, 6) for name, one in found.items()})


def hourly(model: HazardModel, by_node: dict[str, list[Outage]], first: int, last: int) -> list[float]:
    """Return failures a second of all nodes that are in service, for each hour of the test days."""
    calm = (NODES - len(by_node)) * model.history_within(NodeHistory(), HOUR)
    found = []
    for hour in range(24 * first, 24 * last + 1):
        histories = (history_at(mine, hour * HOUR) for mine in by_node.values())
        failing = sum(model.history_within(one, HOUR) for one in histories if one is not None)
        found.append((calm + failing) / HOUR)
    return found


def lived(
    failures: Sequence[float], whole: float, cost: float, periods: Sequence[float], alarms: Sequence[float]
) -> float:
    """Return the share of time that saves and repeated work took; ``periods``: between saves, by hour."""
    extra = sorted(alarms)
    lost, saved, alarm, fault = 0.0, 0.0, 0, 0
    while True:
        following = saved + periods[int(saved // HOUR)]
        while alarm < len(extra) and extra[alarm] <= saved + cost:  # nothing to win any more
            alarm += 1
        if alarm < len(extra):
            following = min(following, extra[alarm])
        if fault < len(failures) and failures[fault] < min(following, whole):
            lost += max(0.0, failures[fault] - saved)
            saved = max(saved, failures[fault])
            fault += 1
        elif following >= whole:
            return lost / whole
        else:
            lost, saved = lost + cost, following


def quantiles(path: Path) -> list[float]:
    with open(path, encoding="utf-8") as file:
        return [float(row["value"]) for row in csv.DictReader(file)]


def acme(data: Path) -> None:
    """Draw healthy samples: each GPU has a level of its own, and moves around it by a tenth of the ranks."""
    for cluster in ("kalos", "seren"):
        temperatures = quantiles(data / f"acme_cdf/gpu_temp_{cluster}_gpu_temp.csv")
        powers = quantiles(data / f"acme_cdf/gpu_power_{cluster}_power.csv")
        for wander in (0.0, 0.02, 0.1, 1.0):
            draw = random.Random(SEED)
            seed_alarms = [0, 0]
            ours, rounds_, actions = 0, 720, 0
            judge, score = Health(cluster, DEFAULT, 1800.0, -HOUR), Weighted()
            levels = [draw.random() for _ in range(8)]
            for number in range(rounds_):
                samples = []
                for index, level in enumerate(levels):
                    rank = draw.random() if wander >= 1 else min(1.0, max(0.0, level + draw.gauss(0, wander)))
                    at = min(len(powers) - 1, int(rank * len(powers)))
                    sample = DeviceSample(
                        *(10.0 * number, cluster, index, f"GPU-{index}", "A100"),
                        temperature=temperatures[min(at, len(temperatures) - 1)],
                        power=powers[at],
                        utilization=min(1.0, 0.2 + rank),
                    )
                    samples.append(sample)
                for one in score.observe(samples):
                    seed_alarms[0] += one.alert
                    seed_alarms[1] += one.terms.score >= 0.10
                for found in judge.observe(samples, 10.0 * number):
                    ours += isinstance(found, Alert)
                    actions += (
                        isinstance(found, Risk)
                        and not found.device
                        and worth_it(found.probability, 5.0, 1800.0)
                    )
            looks = rounds_ * 8
            show(
                *("acme",),
                cluster=cluster,
                wander=wander,
                samples=looks,
                seed_at_threshold=seed_alarms[0] / looks,
                threshold=THRESHOLD,
                seed_at_the_0_10_of_its_code=round(seed_alarms[1] / looks, 4),
                our_alerts=ours,
                our_saves=actions,
            )


PUBLISHED = {"857M": (476, 952, 1904), "1.7B": (1624, 3248, 6496), "7.1B": (7358, 14716, 29432)}
PLANNED = 48  # saves a day, one every 30 minutes


def overhead(_: Path) -> None:
    """Reproduce the published table, the saves of a day in seconds, and count ours for the same day.

    Its baseline is all planned saves; at a gap of 50 and 25 % an alarm at each look saves as often as the
    filter admits. Ours is counted with the policy that decides in the launcher: on a healthy day, with one
    sign of a failing device, and with a hard sign all day and no spare, the same worst case. The time of one
    save is not published; it is taken as the baseline over 48 planned saves.
    """
    interval = 1000
    for model, published in PUBLISHED.items():
        found = []
        for frac in (1.0, 0.5, 0.25):
            last = saves = 0
            for step in range(1, interval + 1):
                if step % interval == 0 or (frac < 1 and should_emergency_save(step, last, interval, frac)):
                    saves, last = saves + 1, step
            found.append(published[0] * saves)
        cost = published[0] / PLANNED
        ours = {
            name: round(published[0] + cost * extra_saves(cost, risk))
            for name, risk in (("healthy", calm), ("one sign", one_sign), ("hard sign all day", doomed))
        }
        row = {"published": published, "reproduced": found, "cost_of_a_save": round(cost, 1), "ours": ours}
        show("overhead", model=model, **row)


def calm(_: float) -> Risk:
    return Risk("n", "", 1e-4, 1800.0)


def one_sign(at: float) -> Risk:
    """Return the risk after an XID of a link at 02:30: 3 %, halved each hour."""
    since = at - 2.5 * HOUR
    return calm(at) if since < 0 else Risk("n", "", max(1e-4, 0.03 * 0.5 ** (since / HOUR)), 1800.0)


def doomed(_: float) -> Risk:
    return Risk("n", "", 1.0, 1800.0, (), True)


def extra_saves(cost: float, risk: Callable[[float], Risk]) -> int:
    """Return the emergency saves of a day with planned ones every 30 minutes; a step takes a second."""
    judge, saved, count = Emergency(), 0, 0
    for second in range(0, int(DAY), 10):
        if second % 1800 == 0:
            saved = second
        work = Work(1, second, saved, (Tier("local", cost, True, float(second - saved)),))
        if any(one.do is Do.SAVE for one in judge.decide(risk(second), work, float(second))):
            saved, count = second, count + 1
    return count


PARTS = {"hazard": hazard, "waste": waste, "acme": acme, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", choices=PARTS, action="append")
    given = parser.parse_args()
    if given.data is None and given.only != ["overhead"]:
        parser.error("DATA is needed for all parts but overhead")
    for name in given.only or PARTS:
        PARTS[name](given.data)


if __name__ == "__main__":
    main()
