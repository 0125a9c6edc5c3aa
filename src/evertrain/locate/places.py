"""What is a process doing, as far as its stack tells?

A stack is sorted into one of a few *places*. Who waits inside a collective, or for the device (where collectives run,
too), is explained by somebody else; who is in any other place is not.
"""

from __future__ import annotations

import functools
import re

import msgspec

from evertrain.model.stacks import Dump, Frame, PlaceKind, Thread

WAITING_FOR_PEERS: frozenset[PlaceKind] = frozenset({"collective", "transfer", "rendezvous", "device"})
"""Places in which a process is a victim until the opposite is shown."""

_KEPT = 8192
"""Frames that stay sorted: a job has a few hundred, and they come again and again."""


class Place(msgspec.Struct, frozen=True):
    kind: PlaceKind
    frame: str = ""
    """The frame that decided, as in the dump; for an unreadable process why it could not be read."""
    caller: str = ""
    """The innermost frame of the user's code or framework above it: where it was called from."""
    is_idle: bool = False
    """py-spy called the thread idle: it waits in the operating system."""


_COLLECTIVE = re.compile(
    r"^_?(all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|monitored_barrier|all_?to_?all|reduce|gather|scatter)"
    r"(_base|_single|_coalesced|_tensor|_into_tensor|_multigpu|_object|_object_list|_fn|_bucket|_v)*_?$",
    re.IGNORECASE,
)
_TRANSFER = re.compile(
    r"^_?(i?send|i?recv)(_tensor|_obj|_object_list|_forward\w*|_backward\w*|_any_source)?_?$"
    r"|^(batch_isend_irecv|_communicate|_p2p_ops|_batched_p2p_ops|p2p_communicate)$",
    re.IGNORECASE,
)
_DISTRIBUTED_FILE = re.compile(
    r"torch/distributed/|distributed_c10d|c10d|(^|/)(comm|comms|p2p|dist|distributed|collectives|communication)(\.py|/)"
    r"|p2p_communication|deepspeed/|horovod|megatron/core/|mpi4py|accelerate/|functional_collectives|fsdp",
)
_NATIVE_COLLECTIVE = re.compile(
    r"\bnccl(AllReduce|AllGather|ReduceScatter|Broadcast|Send|Recv|Reduce|GroupEnd|EnqueueCheck|LaunchKernel|BarrierEnq)"
    r"|c10d::(ProcessGroup|Work|Backend|ops)|gloo::|\bMPI_\w+|ncclCommAbort|WorkNCCL|WorkGloo|wait_tensor"
)
_OUR_HOOK = re.compile(r"(^|/)evertrain/worker/collectives\.py$")
"""Every wait for a collective goes through it, whoever calls it: the script's own `work.wait()`, too."""
_RENDEZVOUS = re.compile(
    r"^(init_process_group|_store_based_barrier|rendezvous|next_rendezvous|_new_process_group_helper|new_group"
    r"|_env_rendezvous_handler|_create_c10d_store|_create_tcp_store|store_based_barrier|ncclCommInitRank\w*)$"
)
_DEVICE = re.compile(
    r"\b(cu|cuda|hip)(Stream|Device|Event|Ctx)Synchronize|^synchronize$|\bcuMemcpy\w*|cudaMemcpy\w*|_local_scalar_dense"
    r"|\bcuStreamQuery|cuEventQuery|^item$|^tolist$|^_cuda_synchronize$"
)
_DEVICE_FILE = re.compile(r"torch/cuda|libcuda|libcudart|torch/_tensor|torch/utils/_device|libhip|libtorch|^$")
_COMPILING = re.compile(r"torch/_(inductor|dynamo)/(?!eval_frame)|triton/|nvcc|ninja|cpp_extension|torch/utils/_triton")
_CHECKPOINT = re.compile(
    r"torch/serialization|distributed/checkpoint|checkpointing\.py|checkpoint_engine|save_checkpoint"
)
_LOADER_FILE = re.compile(
    r"torch/utils/data/|(^|/)(dataloader|data_loader)\.py|webdataset|datasets/|streaming/base|tensorflow/.*data"
)
_LOADER = re.compile(
    r"^(_?next_data|_try_get_data|_get_data|__next__|next_batch|_next_batch|_exec_load_micro_batch|get_batch)$"
)
_STORAGE = re.compile(
    r"^(nfs\w*|rpc_wait\w*|ll_\w+|cl_\w+|osc_\w+|mdc_\w+|ptlrpc\w*|gpfs\w*|ceph_\w+|fuse_\w+|xfs_\w+|ext4_\w+|jbd2\w*"
    r"|wait_on_page\w*|folio_wait\w*|io_schedule\w*|beegfs\w*|cxiWaitEventWait|lustre\w*)$"
    r"|^(write|read|pread|pwrite|fsync|fdatasync|openat?|open|stat|flush|flock|readinto|_write|rename|close|listdir|exists)(64)?$"
)
_FILE_ACCESS = re.compile(
    r"logging/(__init__|handlers)\.py (emit|flush|_open)|_bootstrap_external> \w*(get_data|stat|listdir)"
    r"|fsspec/|s3fs/|gcsfs/|botocore/|boto3/|smart_open|npyio|memmap|(shutil|genericpath|posixpath|pathlib)(/\w+)?\.py|summary/writer"
)
_PYTHON_QUEUE = re.compile(r"(^|/)queue\.py$")
_LOCK = re.compile(
    r"^(acquire|wait|_wait_for_tstate_lock|join|lock|__enter__|futex\w*|pthread_\w*lock\w*|take_gil|sem_wait\w*|do_futex_wait\w*|get|put|select|poll|ep_poll)$"
)
_NATIVE_LOCK = re.compile(
    r"futex|sem_\w*wait|pthread_\w*(lock|wait|join)|lll_lock|take_gil|PyThread_acquire|^poll$|epoll_wait"
)
_WAITING_FILE = re.compile(
    r"(^|/)(threading|queue|queues|synchronize|connection|selectors|subprocess|popen_fork|socket|ssl|concurrent/futures/\w+)\.py$|libpthread|libc|futex|kernel|^$"
)
_GARBAGE = re.compile(r"^(gc_collect\w*|collect)$|Garbage-collecting")
_EXITING = re.compile(
    r"^(destroy_process_group|_exit_function|Py_Finalize\w*|atexit\w*|_shutdown|shutdown|ncclCommDestroy|ncclCommFinalize)$"
)
_PLUMBING = re.compile(
    r"^(torch|threading|queue|multiprocessing|selectors|socket|ssl|importlib|<frozen|concurrent)\b|/lib(64)?/|site-packages/torch/|\.so"
)


def place(dump: Dump) -> Place:
    """Where a process is: its main thread decides, unless an autograd thread is inside a collective for it."""
    return decide(dump)[0]


def decide(dump: Dump) -> tuple[Place, Thread]:
    """Where a process is, and the thread by which that is decided."""
    main = dump.main
    if main is None:
        return Place("unreadable", dump.failure), Thread()
    found = of_thread(main)
    if found.kind == "pinning" and any(_feeds_from_workers(one) for one in dump.threads):
        return msgspec.structs.replace(found, kind="loader"), main
    if found.kind in ("elsewhere", "lock", "device"):
        # backward() waits for the autograd engine's thread, which has no name
        for other in dump.threads:
            if other is not main and _runs_the_model(other):
                beside = of_thread(other)
                if beside.kind in ("collective", "transfer"):
                    return beside, other
    return found, main


def _runs_the_model(thread: Thread) -> bool:
    """Threads of helpers (tqdm, heartbeats, pin memory) have names from Python's threading; autograd's have none."""
    return bool(thread.frames) and (
        not thread.name or "autograd" in thread.name.lower() or thread.name.startswith("pt_")
    )


def _feeds_from_workers(thread: Thread) -> bool:
    """The pin-memory thread, itself waiting for the worker processes: they deliver nothing."""
    return any(one.function.endswith("_pin_memory_loop") for one in thread.frames) and any(
        "multiprocessing/" in one.file for one in thread.frames
    )


def of_thread(thread: Thread) -> Place:
    """Where one thread is: the innermost frame that says something decides."""
    is_idle = thread.state == "idle"
    waits_on: Frame | None = None
    for at, frame in enumerate(thread.frames):
        kind = _kind(frame)
        if kind == "lock":
            # what is waited for is said by the frames above
            waits_on = waits_on or frame
            continue
        if kind == "loader" and any(_PYTHON_QUEUE.search(inner.file) for inner in thread.frames[:at]):
            kind = "pinning"
        if kind is not None:
            return Place(kind, str(frame), _caller(thread.frames[at + 1 :]), is_idle)
    if waits_on is not None:
        return Place("lock", str(waits_on), _caller(thread.frames), is_idle)
    innermost = str(thread.frames[0]) if thread.frames else ""
    return Place("elsewhere", innermost, _caller(thread.frames), is_idle)


@functools.lru_cache(maxsize=_KEPT)
def _kind(frame: Frame) -> PlaceKind | None:
    name, file = frame.function.rpartition(".")[2], frame.file
    if _NATIVE_COLLECTIVE.search(frame.function) or file.startswith("libnccl"):
        return "collective"
    if _OUR_HOOK.search(file) and name in ("wait", "kernel"):
        return "collective"
    if _RENDEZVOUS.match(name):
        return "rendezvous"
    if _EXITING.match(name):
        return "exiting"
    if _DISTRIBUTED_FILE.search(file):
        if _COLLECTIVE.match(name):
            return "collective"
        if _TRANSFER.match(name):
            return "transfer"
    if _LOADER_FILE.search(file) and _LOADER.match(name):
        return "loader"
    if _DEVICE.search(frame.function) and _DEVICE_FILE.search(file):
        return "device"
    if _GARBAGE.match(name) and file in ("", "gc"):
        return "collecting"
    if _CHECKPOINT.search(f"{file} {name}"):
        return "checkpoint"
    if _COMPILING.search(file):
        return "compiling"
    if (not file.endswith(".py") and _STORAGE.match(name)) or _FILE_ACCESS.search(f"{file} {name}"):
        return "storage"
    if (_LOCK.match(name) and _WAITING_FILE.search(file)) or (not file.endswith(".py") and _NATIVE_LOCK.search(name)):
        return "lock"
    return None


def _caller(frames: tuple[Frame, ...]) -> str:
    return next((str(one) for one in frames if not _PLUMBING.search(one.file)), "")
