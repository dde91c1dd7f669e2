"""Every private or version-dependent touch of torch; torch is imported when a function is called."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from types import FrameType

    from torch import Tensor, dtype
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import ProcessGroup, Store
    from torch.nn import Module
    from torch.optim import Optimizer

_GLOO_PATIENCE = 1.0
_ATTEMPT = 0.5  # seconds; an interrupted rank that sleeps for longer than 1.1 s in C++ is replaced
_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")  # open where CUDA, or HIP, is in use


def default_store() -> Store | None:
    """Return the store of the default process group; None when there is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def stops_workers(frame: FrameType | None) -> bool:
    """Say whether torchrun's agent calls its rendezvous' ``shutdown`` as it stops workers.

    In torch 2.4 to 2.6 it does so before the error of a failure is raised, and its launcher calls again once
    it is. Newer versions leave it to the launcher.

    Args:
        frame: of the method that was called.
    """
    return frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name == "_shutdown"


def store_at(listener: socket.socket, host: str, distributed: Any, **options: Any) -> TCPStore:
    """Serve a store at a socket that listens already.

    Before torch 2.8 its usual server, on libuv, takes no such socket (pytorch/pytorch#150215); its other one
    does.

    Args:
        listener: the socket; the store owns it from then on.
        host: the address at which it listens.
        distributed: torch.distributed, which need not be in ``sys.modules``.
        options: of TCPStore.
    """
    if distributed.torch.__version__ < (2, 8):
        options["use_libuv"] = False
    port = listener.getsockname()[1]
    store: TCPStore = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **options
    )
    return store


def own_store() -> Store | None:
    """Return the store of the default process group over a connection of one's own; None: there is no group.

    A client waits with its lock held, so who waits on another thread needs one that nobody else uses. Before
    torch 2.5 there is no way to one: others then wait up to a second for the lock.
    """
    store = default_store()
    return store.clone() if store is not None and hasattr(store, "clone") else store


@functools.cache
def connect_to_stores_in_steps() -> None:
    """See to it that a signal ends the wait for the store of a generation that is over.

    torch's client tries again until its timeout (30 min) without a return to Python, so that no handler runs.
    Here an attempt takes :data:`_ATTEMPT` seconds at most, and each one twice as long as the one before.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    # The package has a function of this name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    @functools.wraps(original)
    def create(
        host: str, port: int, rank: int, world: int, timeout: timedelta, *more: Any, **options: Any
    ) -> Any:
        if not rendezvous._torchelastic_use_agent_store():
            return original(host, port, rank, world, timeout, *more, **options)
        end, attempt = time.monotonic() + timeout.total_seconds(), _ATTEMPT
        while (left := end - time.monotonic()) > attempt:
            with contextlib.suppress(dist.DistError):
                store = original(host, port, rank, world, timedelta(seconds=attempt), *more, **options)
                store.set_timeout(timeout)
                return store
            attempt *= 2
        return original(host, port, rank, world, timedelta(seconds=max(left, _ATTEMPT)), *more, **options)

    rendezvous._create_c10d_store = create


@functools.cache
def let_gloo_finish_at_exit() -> None:
    """See to it that gloo's threads have let go of the last collective before the interpreter ends.

    To let go of a tensor they take the interpreter's lock; one that asks for it while the interpreter ends is
    unwound, and the process aborts (pytorch/pytorch#190489): SIGABRT for a rank that is done. Call it before
    the script has handlers of its own: they run first.
    """
    atexit.register(_let_gloo_finish)


def let_gloo_finish_when_destroyed() -> None:
    """See to it that gloo's threads have let go of the last collective when the script destroys its groups.

    The last backward's collectives hold a Python object (``_engine_run_backward`` stashes the context), so
    gloo's thread takes the interpreter's lock to free them. A model that is freed at once joins that thread
    while it holds the lock, and the rank never ends. Imports that a fork need not make hide this elsewhere.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **options: Any) -> None:
        original(*args, **options)
        _let_gloo_finish()

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group


def _let_gloo_finish() -> None:
    if "torch.distributed" not in sys.modules:
        return
    quiet, end = 0, time.monotonic() + _GLOO_PATIENCE
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)  # lets go of the lock
        quiet = 0 if any(map(_runs_gloo, Path("/proc/self/task").glob("*/stat"))) else quiet + 1


def _runs_gloo(stat: Path) -> bool:
    try:
        found = stat.read_text()
    except OSError:  # the thread has ended
        return False
    return "(pt_gloo_runloop) R" in found


def gpu_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many clock cycles of the device; returns at once."""
    import torch

    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def has_cuda_graph() -> bool:
    """Return whether a CUDA graph of this process is alive; looks at every object that Python knows."""
    import torch

    return any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())


def forks_lack_cuda() -> bool:
    """Return whether a fork of this process could not use CUDA, because something here has used it.

    That something may be no more than ``torch.cuda.is_available()``: only a fork can tell. A library other
    than torch is known by the driver's file that it holds open.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            if os.readlink(f"/proc/self/fd/{number}") in _DRIVERS:
                return True
    try:
        child = os.fork()
    except OSError:  # none can be made, so no rank either: that is said where it is tried
        return False
    if child == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def batches_taken() -> list[int]:
    """Return, of each iterator of a DataLoader that is alive, how many batches were taken from it."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    found = (one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter))
    return [one._num_yielded for one in found if hasattr(one, "_num_yielded")]


def takes_plainly(module: Module) -> bool:
    """Say whether a module and all in it give and take their states as torch's own do, without hooks."""
    methods = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    return all(
        all(getattr(type(one), name).__module__.startswith("torch.nn.") for name in methods)
        and not vars(one).keys() & set(methods)
        and not (one._state_dict_hooks or one._state_dict_pre_hooks or one._load_state_dict_pre_hooks)
        for one in module.modules()
    )


def norms_of(tensors: Sequence[Tensor], kind: dtype | None) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, still on its device; sums are made in ``kind``, None: in its own."""
    import torch

    found: Sequence[Tensor] = torch._foreach_norm(tensors, 2, dtype=kind)  # type: ignore[arg-type]
    return found


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one device to others there, in a call for all of them."""
    import torch

    torch._foreach_copy_(targets, sources)


def one_behind_the_other(tensors: list[Tensor]) -> Tensor:
    """Return the elements of tensors of one device and type in one tensor, in a call for all of them."""
    import torch

    kind = tensors[0].device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(kind):  # it would change types
            stack.enter_context(torch.autocast(kind, enabled=False))
        found: Tensor = torch._C._nn.flatten_dense_tensors(tensors)
        return found.resolve_conj().resolve_neg()


def local_and_placement(tensor: Tensor) -> tuple[Tensor, object]:
    """Return this process's part of a distributed tensor, and a value that is equal for equal placements.

    The types of placements are compared, too: a strided shard was equal to a plain one once.
    """
    spec = tensor._spec  # type: ignore[attr-defined]
    return tensor._local_tensor, (spec, tuple(map(type, spec.placements)))  # type: ignore[attr-defined]


def distributed_like(template: Tensor, local: Tensor) -> Tensor:
    """Return a distributed tensor that is placed as another one and has ``local`` as its part, uncopied."""
    import torch

    with torch.no_grad():
        found: Tensor = type(template).from_local(  # type: ignore[attr-defined]
            local,
            template.device_mesh,  # type: ignore[attr-defined]
            template.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )
    return found


def groups_by_backend() -> dict[str, list[ProcessGroup]]:
    """Return this process's groups by backend; one with several is under each of them."""
    import torch.distributed as dist

    found: dict[str, list[ProcessGroup]] = {}
    if not dist.is_available() or not dist.is_initialized():
        return found
    from torch.distributed.distributed_c10d import _world

    for group in list(_world.pg_map):
        names = {group._get_backend(device).name() for device in group._device_types}
        for name in sorted(names):
            found.setdefault(name.lower(), []).append(group)
    return found


@dataclass(frozen=True)
class Collective:
    """One entry of the flight recorder.

    Args:
        record: number of the entry, in the order of this process.
        group: name of the group, the same on all its ranks.
        instance: tells a group from an earlier one of its name.
        number: of the collective within its group, the same on all its ranks.
        name: what is done, and with what.
        left: it is over on this rank.
    """

    record: int
    group: str
    instance: int
    number: int
    name: str
    left: bool


_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of any backend, from torch 2.7 on; of NCCL
_SIZES_AGREE = ("all_reduce", "allreduce", "broadcast")  # of others, sizes may differ between ranks


def recorded_collectives() -> list[Collective]:
    """Return the latest collectives of this process, without stacks; safe on any thread, in any moment."""
    library = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    for name in _DUMPS:
        dump = getattr(library, name, None)
        trace = json.loads(dump(True, False)) if dump is not None else {}
        for entry in trace.get("entries", ()):
            if entry.get("is_p2p") or not entry.get("collective_seq_id"):
                continue
            found.append(
                Collective(
                    record=int(entry["record_id"]),
                    group=str(entry["process_group"][0]),
                    instance=int(entry["pg_id"]),
                    number=int(entry["collective_seq_id"]),
                    name=_collective_name(entry),
                    left=bool(entry.get("retired")) or entry.get("state") == "completed",
                )
            )
    return found


def _collective_name(entry: dict[str, object]) -> str:
    operation = str(entry.get("profiling_name", "")).rpartition(":")[2]
    if operation in _SIZES_AGREE:
        return f"{operation} of {entry.get('input_sizes')} {entry.get('input_dtypes')}".replace("'", "")
    return operation


def members_of_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    if world is None:
        return {}
    ranks = dict(world.pg_group_ranks)
    return {str(name): sorted(ranks.get(group, ())) for group, name in dict(world.pg_names).items()}


def forget_half_made_groups() -> None:
    """Let the next default group have the name that it has in a new process.

    Groups are named by a count that only the end of the default group resets. One whose making failed has
    used up a name, and a rank whose names differ from the others' never meets them.
    """
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        return
    from torch._C._distributed_c10d import _unregister_all_process_groups
    from torch.distributed.distributed_c10d import _world

    _world.pg_map.clear()
    _world.pg_names.clear()
    _world.pg_group_ranks.clear()
    _world.pg_backend_config.clear()
    _world.pg_to_tag.clear()
    _world.tags_to_pg.clear()
    _world.pg_coalesce_state.clear()
    _unregister_all_process_groups()
    _world.group_count = 0


def abort_nccl(group: ProcessGroup) -> None:
    """Abort the communicators of a group's NCCL backend; blocks as long as NCCL does."""
    import torch

    backend = group._get_backend(torch.device("cuda"))
    getattr(backend, "abort" if hasattr(backend, "abort") else "_abort")()  # _abort until torch 2.5


def device_uuid(index: int) -> str:
    """Return a CUDA device's UUID as NVML writes it; its name and index where torch does not tell it.

    torch leaves out whether it is of a GPU or of a part of one (MIG); the name of a part says so.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    found = getattr(properties, "uuid", None)
    kind = "MIG" if " MIG " in properties.name else "GPU"
    return f"{kind}-{found}" if found is not None else f"{properties.name} number {index}"


def persistent_buffers(module: Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return where a module and all in it hold the buffers that are part of their states, by name."""
    return [
        (one._buffers, name)
        for one in module.modules()
        for name, buffer in one._buffers.items()
        if buffer is not None and name not in one._non_persistent_buffers_set
    ]


def fleeting_buffers(module: Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that a module's state does not have, by name."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, one in module.named_modules()
        for name in one._non_persistent_buffers_set
        if (buffer := one._buffers.get(name)) is not None
    ]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same forms, in few kernels where torch can."""
    import torch

    if targets:
        torch._foreach_copy_(targets, sources)


def processors_near_gpus(mode: str, ranks: int) -> list[list[int]]:
    """Return the processors that torchrun's ``--numa-binding`` gives each of the first local ranks.

    Raises:
        RuntimeError: this torch has no NUMA binding, or there is no GPU for a rank.
    """
    try:
        from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to
    except ImportError:
        raise RuntimeError("this version of torch has no torch.numa.binding") from None
    import torch

    if torch.cuda.device_count() < ranks:
        raise RuntimeError(f"{ranks} local ranks, and torch sees {torch.cuda.device_count()} GPU(s)")
    options = NumaOptions(affinity_mode=AffinityMode(mode))
    return [
        sorted(_get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)) for rank in range(ranks)
    ]


def profiler_runs() -> bool:
    """Say whether the script's profiler runs or waits for its steps, or any one on this thread.

    One that was not left as a context manager counts for ever: torch keeps no other sign of its warm-up, in
    which a second one would end the process.
    """
    from torch._C._autograd import _profiler_enabled
    from torch.autograd import profiler

    scheduled = "ProfilerStep" in profiler.KinetoStepTracker._step_dict
    return bool(profiler._is_profiler_enabled or scheduled or _profiler_enabled())


def begin_profile(on_device: bool) -> None:
    """Begin to record kernels of CUDA, or operators of the CPU on this thread.

    ``torch.profiler.profile`` would set a flag by which torch and others record more, reads the trace into
    thousands of objects, and cannot tell at its end whether the script's own profiler took its place.
    """
    from torch._C._autograd import _enable_profiler, _prepare_profiler
    from torch.autograd import profiler

    device = "cuda" if on_device else None
    chosen = profiler.profile(use_cpu=not on_device, use_device=device, use_kineto=True)
    config = chosen.config()  # type: ignore[no-untyped-call]
    activities = chosen.kineto_activities
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)


def end_profile(on_device: bool, most: int) -> list[tuple[str, float]] | None:
    """Return name and seconds of what was recorded; None: the script's profiler has ended the recording.

    Args:
        on_device: as at the begin.
        most: events that are read.
    """
    import torch
    from torch._C._autograd import DeviceType, _disable_profiler, _profiler_enabled
    from torch.autograd import profiler

    if profiler._is_profiler_enabled or not _profiler_enabled():
        return None
    if on_device:
        torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_device else DeviceType.CPU
    recorded = itertools.islice(_disable_profiler().events(), most)
    return [(one.name(), one.duration_ns() * 1e-9) for one in recorded if one.device_type() == wanted]


def loads_itself(module: Any) -> bool:
    """Say whether a module takes its own entries of a state in another way than torch's modules do."""
    from torch import nn

    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own or bool(module._load_state_dict_pre_hooks)


def must_consolidate(optimizer: Any) -> bool:
    """Say whether an optimizer gives its state only after its parts were gathered on one rank."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind) and type(optimizer).state_dict is kind.state_dict


def steppers_of(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that do the steps of one: itself, or what a wrapper without hooks wraps."""
    from torch import optim

    def has_hooks(one: Any) -> bool:
        return isinstance(one, optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(one)

    return (
        [optimizer] if has_hooks(optimizer) else [one for one in vars(optimizer).values() if has_hooks(one)]
    )
