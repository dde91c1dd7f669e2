"""The examples at the end of the help pages that have none of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "plan": (
        "outlast plan --model gpt3-7.1b --global-batch 512 --gpus 64",
        "outlast plan --model config.json --global-batch 512 --gpus 64 --tp 8 --pp 2 --must-survive 2",
    ),
    "preflight": (
        "outlast preflight --run-dir /shared/gpt --nproc-per-node 8 --gpus 8 --port 29500",
        "outlast preflight --skip torch --limit shm_size=64MiB",
    ),
    "health": (
        "outlast health --watch --interval 5",
        "outlast health fit --out health-model.json outlast-runs",
        'outlast health ledger --repaired node7 --reason "new GPU" outlast-runs/train/ledger',
    ),
    "top": ("outlast top outlast-runs/train", "outlast top --once --json outlast-runs/train"),
    "dashboard": (
        "outlast dashboard outlast-runs/train",
        "outlast dashboard --host 0.0.0.0 --token-file token outlast-runs",
    ),
    "request": (
        "outlast request outlast-runs/train save",
        "outlast request --node n03 outlast-runs/train drain",
    ),
    "metrics": (
        "outlast metrics --textfile /var/lib/node_exporter/outlast.prom outlast-runs/train",
        "outlast metrics --rules > outlast-rules.yaml",
    ),
    "report": (
        "outlast report",
        "outlast report outlast-runs/train",
        "outlast report --json outlast-runs/train",
    ),
    "stragglers": ("outlast stragglers outlast-runs/train",),
    "ckpt": (
        "outlast ckpt ls outlast-runs/train",
        "outlast ckpt verify outlast-runs/train",
        "outlast ckpt prune --keep-last-n 3 --dry-run outlast-runs/train",
        "outlast ckpt export --format hf --to exported outlast-runs/train step-000000100.g1",
    ),
    "replay": ("outlast replay --from 100 --to 200 outlast-runs/train -- train.py --lr 1e-3",),
    "chaos": (
        "outlast chaos inject --fault rank_killed --rank 1 outlast-runs/train",
        "outlast chaos run --fault LOCK_GIL --rank 1 train.py",
    ),
    "slurm": (
        "outlast slurm lint job.sh",
        "outlast slurm submit --dry-run -- --nproc-per-node=8 train.py",
    ),
    "k8s": ("outlast k8s lint job.yaml", "outlast k8s render --help"),
    "ray": ("outlast ray run --help", "outlast ray submit --help"),
    "demo": ("outlast demo", "outlast demo --nproc-per-node 2 --seed 7 --dir demo"),
}


def ending(command: str) -> str:
    """Return the end of a command's help page; empty: the page has examples of its own."""
    lines = EXAMPLES.get(command, ())
    return "\nexamples:\n" + "".join(f"  {line}\n" for line in lines) if lines else ""
