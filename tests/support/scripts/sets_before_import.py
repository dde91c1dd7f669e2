# ruff: noqa: E402 - what is imported when is what these scripts are about
"""Set variables, import torch, and write down what came of them.

arguments: folder, then NAME=VALUE, or the word ``import``: what follows is set with torch imported.

``first`` in the answer is what the first statement of a script can see of what a launcher has imported.
"""

from __future__ import annotations

import sys

first = {
    "torch": "torch" in sys.modules,
    "numpy": "numpy" in sys.modules,
    "modules": sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)),
}

import json
import os
import warnings
from pathlib import Path

first["filters"] = [str(one[:1] + one[2:]) for one in warnings.filters]
first["environment"] = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "CUDA_")) and "ELASTIC" not in name
}
folder, *words = sys.argv[1:]
with open(f"{folder}/begun-{os.environ['RANK']}", "a") as file:
    file.write(f"{os.getpid()}\n")
for word in words:
    if word == "import":
        import torch
    else:
        name, _, value = word.partition("=")
        os.environ[name] = value.replace("RANK", os.environ["RANK"])

import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
import torch.nn.parallel

found = {
    "first": first,
    "threads": torch.get_num_threads(),
    "parallel": [
        line
        for line in torch.__config__.parallel_info().splitlines()
        if line.strip().startswith(
            ("at::get_num_threads", "omp_get_max", "mkl_get_max", "OMP_NUM", "MKL_NUM")
        )
    ],
    "dynamo_disabled": torch._dynamo.config.disable,
    "autotune": torch._inductor.config.max_autotune,
    "level": str(dist.get_debug_level()),
    "tf32": torch.backends.cuda.matmul.allow_tf32,
    "loggers": torch._logging._internal.log_state.log_qname_to_level,
    "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TORCH_LOGS")},
}
Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found, default=str))
