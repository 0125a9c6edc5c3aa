"""Jobs that stand still, as agents would see them: stacks, pages and groups, for the tests of locate/."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from evertrain.locate import grouping, stacks
from evertrain.locate.grouping import Merged, Seen
from evertrain.locate.parallel import line
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.recording import Group, Recording
from evertrain.model.stacks import NodeCapture, ProcessKind

C10D = "torch/distributed/distributed_c10d.py"
LOADER = "torch/utils/data/dataloader.py"
TRAIN = ("step (train.py:40)", "main (train.py:90)")

ALL_REDUCE = (f"all_reduce ({C10D}:2501)", "wrapper (torch/distributed/c10d_logger.py:83)", *TRAIN)
ALL_GATHER = (f"all_gather_into_tensor ({C10D}:3900)", "wrapper (torch/distributed/c10d_logger.py:83)", *TRAIN)
SEND = (f"isend ({C10D}:2100)", "send_backward (train.py:60)", "main (train.py:90)")
RECV = (f"irecv ({C10D}:2140)", "recv_backward (train.py:64)", "main (train.py:90)")
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:825)", "backward (torch/_tensor.py:570)", *TRAIN)
WORKERS = (
    "_poll (multiprocessing/connection.py:947)", "get (multiprocessing/queues.py:113)",
    f"_try_get_data ({LOADER}:1132)", f"__next__ ({LOADER}:530)", "main (train.py:80)",
)  # fmt: skip
FETCH = ("__getitem__ (data.py:12)", "fetch (torch/utils/data/_utils/fetch.py:50)", f"_next_data ({LOADER}:700)",
         f"__next__ ({LOADER}:530)", "main (train.py:80)")  # fmt: skip
WORKER = ("__getitem__ (data.py:12)", "fetch (torch/utils/data/_utils/fetch.py:50)",
          "_worker_loop (torch/utils/data/_utils/worker.py:349)")  # fmt: skip
IDLE_WORKER = ("wait (multiprocessing/connection.py:947)", "get (multiprocessing/queues.py:113)",
               "_worker_loop (torch/utils/data/_utils/worker.py:340)")  # fmt: skip
SLEEP = ("wait_for_record (train.py:30)", "main (train.py:85)")
LOOP = ("pack (train.py:33)", "main (train.py:85)")
SAVE = ("poll (multiprocessing/popen_fork.py:28)", "join (multiprocessing/process.py:149)",
        "save_checkpoint (train.py:70)", "main (train.py:95)")  # fmt: skip
WRITER = ("_open_zipfile_writer (torch/serialization.py:700)", "save (torch/serialization.py:850)")
READ = ("open (pathlib.py:1044)", "read_bytes (pathlib.py:1050)", "read_shard (train.py:20)", "main (train.py:80)")


def text(frames: Iterable[str], state: str = "idle") -> str:
    body = "\n".join(f"    {frame}" for frame in frames)
    return f'Process 9: python train.py\n\nThread 9 ({state}): "MainThread"\n{body}\n'


class Job:
    """All ranks wait in the same all_reduce of the world, until told otherwise."""

    def __init__(self, mesh: Mapping[str, int], per_node: int = 2) -> None:
        self.mesh, self.per_node = dict(mesh), per_node
        self.size = math.prod(mesh.values())
        self.nodes = {rank: f"node-{rank // per_node}" for rank in range(self.size)}
        self.groups = {"0": Group("0", "default_pg", tuple(range(self.size)))}
        for dim in mesh:
            for rank in range(self.size):
                members = line(self.mesh, rank, dim)
                self.groups[self.name(dim, rank)] = Group(self.name(dim, rank), f"mesh_{dim}", members)
        self.processes: dict[tuple[int, int], Seen] = {}
        self.activities: dict[int, RankActivity] = {}
        self.recordings: dict[int, Recording] = {}
        for rank in range(self.size):
            self.waits(rank, "world", "allreduce", 41)

    def name(self, dim: str, rank: int) -> str:
        return "0" if dim == "world" else f"{dim}{line(self.mesh, rank, dim)[0]}"

    def see(
        self, rank: int, frames: Iterable[str], state: str = "idle", *, kernel: str = "", waits_in: str = "",
        kind: ProcessKind = "trainer", pid: int = 0,
    ) -> None:  # fmt: skip
        (dump,) = stacks.read(text(frames, state) if frames else "Error: Failed to suspend process\n")
        pid = pid or 1000 + 10 * rank
        self.processes[rank, pid] = Seen(
            rank=rank, pid=pid, kind=kind, state=kernel, waits_in=waits_in, dump=dump,  # type: ignore[arg-type]
        )  # fmt: skip

    def page(self, rank: int, last: Operation | None, *, inside: bool, cpu: float | None = 0.0, step: int = 7) -> None:
        self.activities[rank] = RankActivity(
            rank=rank, node=self.nodes[rank], still_s=6.0, inside=last if inside else None, last=last, started=True,
            step=step, cpu_fraction=cpu, io_bytes_per_s=0.0, faults_per_s=0.0,
        )  # fmt: skip

    def waits(
        self, rank: int, dim: str, op: str, seq: int, frames: Iterable[str] | None = None, *, step: int = 7
    ) -> None:
        """Inside an operation, by its page and its stack."""
        if frames is None:
            frames = {"a": ALL_REDUCE, "s": SEND, "r": RECV, "_": ALL_GATHER}[op[0]]
        self.see(rank, frames, waits_in="futex_wait_queue")
        self.page(rank, Operation(self.name(dim, rank), op, seq), inside=True, step=step)

    def outside(
        self, rank: int, frames: Iterable[str], state: str = "idle", *, last: Operation | None = None,
        cpu: float = 0.0, kernel: str = "", waits_in: str = "",
    ) -> None:  # fmt: skip
        """Outside of all operations, by its page and its stack; it has done what came before the world's 41st."""
        self.see(rank, frames, state, kernel=kernel, waits_in=waits_in)
        self.page(rank, last or Operation("0", "allreduce", 40), inside=False, cpu=cpu)

    def captures(self, number: int = 1, missing: Iterable[str] = ()) -> list[NodeCapture]:
        found = []
        ranks: dict[str, list[int]] = {}
        for rank, node in self.nodes.items():
            ranks.setdefault(node, []).append(rank)
        processes: dict[str, list[Seen]] = {}
        for one in self.processes.values():
            processes.setdefault(self.nodes[one.rank], []).append(one)
        groups: dict[str, dict[str, Group]] = {}
        for group in self.groups.values():
            for rank in group.members:
                groups.setdefault(self.nodes[rank], {})[group.name] = group
        for node, here in ranks.items():
            if node not in missing:
                found.append(
                    NodeCapture(
                        number=number,
                        attempt=1,
                        node=node,
                        time=100.0 + number,
                        positions=grouping.group(processes.get(node, ())),
                        activities=tuple(self.activities[rank] for rank in here if rank in self.activities),
                        groups=grouping.slim(groups[node].values(), here, self.size),
                        recordings=tuple(self.recordings[rank] for rank in here if rank in self.recordings),
                    )
                )
        return found

    def merged(self, number: int = 1, missing: Iterable[str] = ()) -> Merged:
        return grouping.merge(self.captures(number, missing), self.nodes)
