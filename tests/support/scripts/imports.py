# ruff: noqa: E402 - what is imported when is what these scripts are about
"""Import what the zygote has imported ahead in every odd way, and print what does not work."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import warnings

wrong: list[str] = []


def check(what: str, holds: object) -> None:
    if not holds:
        wrong.append(what)


check("torch is hidden at first", "torch" not in sys.modules and "numpy" not in sys.modules)
spec = importlib.util.find_spec("torch")
check("to look for torch does not import it", spec is not None and "torch" not in sys.modules)
check(
    "what is found says where torch is", spec is not None and str(spec.origin).endswith("torch/__init__.py")
)
check("and that it is a package", spec is not None and spec.submodule_search_locations)
check("a module that is nowhere is not found", importlib.util.find_spec("no_such_module") is None)
check(
    "a child has no torch either",
    "torch"
    not in subprocess.check_output([sys.executable, "-c", "import sys; print(list(sys.modules))"], text=True),
)

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as Lightning does; it is read at each use
import numpy

check("numpy comes without torch", "torch" not in sys.modules)
found: list[object] = []
threads = [
    threading.Thread(target=lambda: found.append(importlib.import_module("torch.nn"))) for _ in range(8)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
check("threads import one torch", len(set(map(id, found))) == 1 and len(found) == 8)

import torch

check(
    "torch has its own spec",
    torch.__spec__ is not None and type(torch.__spec__.loader).__name__ == "SourceFileLoader",
)
check("torch.nn is its attribute", torch.nn is sys.modules["torch.nn"])
check("torch sees the same numpy", torch.from_numpy(numpy.zeros(2)).numpy().sum() == 0)
check("the compiler is not there yet", "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch))
check("a tensor is pickled", torch.equal(pickle.loads(pickle.dumps(torch.ones(3))), torch.ones(3)))
check("a module is pickled", pickle.loads(pickle.dumps(torch.nn.Linear(2, 2))).in_features == 2)
check("torch can be asked for the compiler", torch._dynamo.config is not None)
check("which is then there", sys.modules["torch._dynamo"] is torch._dynamo)
import torch.optim.lr_scheduler as schedulers

check("a module can be loaded again", importlib.reload(schedulers) is schedulers)
import outlast

check("outlast is there", outlast.start.__name__ == "start")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.tensor([1.0]).numpy()
    warnings.warn("mine", stacklevel=1)
check("warnings are seen", [str(one.message) for one in seen] == ["mine"])
model = torch.nn.Linear(2, 2)
torch.nn.functional.mse_loss(model(torch.ones(2)), torch.zeros(2)).backward()
torch.optim.SGD(model.parameters(), 0.1).step()
check("__main__ has one name for multiprocessing, too", sys.modules["__mp_main__"] is sys.modules["__main__"])
print("wrong:", wrong)
