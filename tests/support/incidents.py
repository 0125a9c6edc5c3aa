"""Failures in other forms than the known cases have: other versions, other wording, other prefixes.

Each is `(name, signals, category, action, host)`; the host is None where nobody is convicted by name.
"""

from __future__ import annotations

from typing import Any

Form = tuple[str, dict[str, Any], str, str, str | None]

TORCHRUN = """\
E0311 18:33:20.104000 4021 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: 3 (pid: 90211) of binary: /usr/bin/python3
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-03-11_18:33:20
  host      : gpu-a-12
  rank      : 43 (local_rank: 3)
  exitcode  : {code} (pid: 90211)
  error_file: <N/A>
  traceback : {traceback}
============================================================"""

NCCL_FOLLOWERS = [
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
    "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "gpu-a-03:77:99 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer gpu-a-12<41234>",
]
WATCHDOG = (
    "[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)


def torchrun(code: int, traceback: str = "<N/A>") -> list[str]:
    return TORCHRUN.format(code=code, traceback=traceback).splitlines()


def logs(*lines: str, **more: Any) -> dict[str, Any]:
    return {"logs": list(lines), **more}


def dmesg(*lines: str, host: str | None = "gpu-a-12", **more: Any) -> dict[str, Any]:
    return {"dmesg": list(lines), **({"collected_from": {"dmesg": host}} if host else {}), **more}


def facts(**metrics: Any) -> dict[str, Any]:
    return {"metrics": metrics}


FORMS: tuple[Form, ...] = (
    # GPUs
    ("xid 79 with followers", dmesg("[  812.1] NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", logs=NCCL_FOLLOWERS), "gpu_hardware", "evict", "gpu-a-12"),
    ("xid 79 in syslog", dmesg("Mar  3 11:04:05 worker-7 kernel: [99.2] NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off the bus.", host=None), "gpu_hardware", "evict", "worker-7"),
    ("lost without a code, one line", dmesg("kern  :err   : 2025-01-21T04:41:44,283302+00:00 NVRM: GPU 0000:4b:00.0: GPU has fallen off the bus."), "gpu_hardware", "evict", "gpu-a-12"),
    ("xid 48 with 63", dmesg("[1.1] NVRM: Xid (PCI:0000:5d:00): 48, pid=1, An uncorrectable double bit error (DBE) has been detected on GPU", "[1.2] NVRM: Xid (PCI:0000:5d:00): 63, pid=1, Row Remapper: New row marked for remapping"), "gpu_memory_ecc", "evict", "gpu-a-12"),
    ("xid 94 with 45", dmesg("[1.1] NVRM: Xid (PCI:0000:5d:00): 94, pid=71, name=python, Contained: SM (0x1). RST: No, D-RST: No", "[1.2] NVRM: Xid (PCI:0000:5d:00): 45, pid=71, name=python, Ch 00000008", exitcode=-6), "gpu_memory_ecc", "evict", "gpu-a-12"),
    ("xid 154 orders a reset", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"), "gpu_hardware", "evict", "gpu-a-12"),
    ("xid 154 none", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"), "none", "none", None),
    ("xid 63 alone", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 63, pid=1850, Row Remapper: New row marked for remapping, reset gpu to activate"), "none", "none", None),
    ("xid 43 alone, no job", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 43, pid=1850, name=python, Ch 00000008"), "none", "none", None),
    ("xid 74 and the job died", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0)", exitcode=-6), "nvlink_fabric", "evict", "gpu-a-12"),
    ("xid 13 at one processor in many runs", dmesg(*[f"[{at}.1] NVRM: Xid (PCI:0000:5d:00): 13, pid={at}, name=python, Graphics SM Warp Exception on (GPC 3, TPC 1, SM 0): Illegal Instruction Encoding" for at in (1000, 9000, 20000)]), "gpu_hardware", "evict", "gpu-a-12"),
    ("xid 31 on one GPU", dmesg("[5.1] NVRM: Xid (PCI:0000:5d:00): 31, pid=7, name=python, Ch 00000010, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f_0"), "user_code", "user_code", None),
    ("xid 119 on many hosts", dmesg(*[f"gpu-a-{n}: [5.1] NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=python, Timeout after 45s of waiting for RPC response from GPU4 GSP!" for n in range(10, 16)], host=None), "driver_gsp", "human", None),
    ("xid 149 link down, peer's fault", dmesg("[5.1] NVRM: Xid (PCI:0008:01:00): 149, pid=1, name=x, NETIR_LINK_DOWN Fatal XC0 i0 Link 03 (0x022001c6 0x00000000 0x0 0x0 0x0 0x0 0x0)"), "nvlink_fabric", "human", None),
    ("xid 149 signal integrity", dmesg("[5.1] NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal XC0 i0 Link 03 (0x00a00011 0x00000000 0x0 0x0 0x0 0x0 0x0)"), "nvlink_fabric", "evict", "gpu-a-12"),
    ("xid 149 bit errors", dmesg("[5.1] NVRM: Xid (PCI:0008:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00000013 0x00000000 0x0 0x0 0x0 0x0 0x0)"), "none", "none", None),
    ("sxid fatal", dmesg("nvidia-nvswitch1: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"), "nvlink_fabric", "evict", "gpu-a-12"),
    ("fabric manager down", logs("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", collected_from={"logs": "gpu-a-12"}), "nvlink_fabric", "evict", "gpu-a-12"),
    ("ecc through nccl", logs("gpu-a-12:10:20 [3] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'", *NCCL_FOLLOWERS), "gpu_memory_ecc", "evict", "gpu-a-12"),
    ("nvml lost", logs("[gpu-a-12] pynvml.NVMLError_GpuIsLost: GPU is lost"), "gpu_hardware", "evict", "gpu-a-12"),
    ("driver mismatch", logs("gpu-a-12: Failed to initialize NVML: Driver/library version mismatch"), "driver_gsp", "evict", "gpu-a-12"),
    ("driver too old", logs("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."), "driver_gsp", "human", None),
    ("illegal access, same host again", {"logs": ["RuntimeError: CUDA error: an illegal memory access was encountered"], "metrics": {"history": "fails again on the same host, other nodes are fine"}, "collected_from": {"logs": "gpu-a-12"}}, "gpu_hardware", "evict", "gpu-a-12"),
    # network
    ("mlx5 gives up", dmesg("mlx5_core 0000:c3:00.0: wait_func:1151:(pid 712): ENABLE_HCA(0x104) timeout. Will cause a leak of a command resource"), "network_ib", "evict", "gpu-a-12"),
    ("port flaps", dmesg(*[f"Aug 17 06:{n:02d}:01 node-07 systemd-networkd[5398]: ib3: lost carrier" for n in range(8)], host=None), "network_ib", "evict", "node-07"),
    ("one flap", dmesg("Aug 17 06:01:01 node-07 systemd-networkd[5398]: ib3: lost carrier", host=None), "none", "none", None),
    ("access register noise", dmesg(*["mlx5_core 0000:c3:00.0: mlx5_cmd_out_err:808:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)"] * 5), "none", "none", None),
    ("transmit queue three times", dmesg(*[f"[{n}.0] NETDEV WATCHDOG: ens1 (mlx5_core): transmit queue {n} timed out" for n in (100, 200, 300)]), "network_ib", "human", None),
    ("port error with name of device", logs("gpu-a-12:34050:34121 [0] NCCL WARN NET/IB : mlx5_4:1 Got async event : port error", "gpu-a-12:34051:34122 [1] NCCL WARN NET/IB : mlx5_4:1 Got async event : port error", *NCCL_FOLLOWERS), "network_ib", "evict", "gpu-a-12"),
    ("wrong gid index", logs("NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 0"), "network_config", "human", None),
    ("no interface", logs("NCCL WARN Bootstrap : no socket interface found", "ncclInternalError: Internal check failed."), "network_config", "human", None),
    ("locked memory", logs("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "torch.distributed.DistBackendError: NCCL error in: x, unhandled system error"), "container_config", "human", None),
    # hosts and schedulers
    ("kernel panic", dmesg("[9.1] Kernel panic - not syncing: Fatal exception in interrupt"), "host_os", "evict", "gpu-a-12"),
    ("soft lockup", dmesg("[9.1] watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [kworker/3:1:88]"), "host_os", "evict", "gpu-a-12"),
    ("local disk", dmesg("[9.1] nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", "[9.2] blk_update_request: I/O error, dev nvme0n1, sector 1"), "host_os", "evict", "gpu-a-12"),
    ("slurm lost a node", logs("srun: error: Node failure on gpu-a-12", "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", "slurmstepd: error: *** STEP 88.0 ON gpu-a-01 CANCELLED AT 2024-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", exitcode=143), "host_os", "evict", "gpu-a-12"),
    ("kubernetes lost a node", logs("Warning  NodeNotReady  pod/train-worker-3  Node is not ready", collected_from={"logs": "gpu-a-12"}), "host_os", "evict", "gpu-a-12"),
    ("node short of disk", logs("Warning  Evicted  pod/train-1  The node was low on resource: ephemeral-storage.", exitcode=137, collected_from={"logs": "gpu-a-12"}), "host_os", "retry", "gpu-a-12"),
    ("preempted", logs("slurmstepd: error: *** JOB 8123 ON gpu-a-12 CANCELLED AT 2024-01-01T00:00:00 DUE TO PREEMPTION ***", exitcode=-15), "preemption", "retry", None),
    ("time limit", logs("slurmstepd: error: *** STEP 77.0 ON gpu-a-12 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***", *NCCL_FOLLOWERS, exitcode=143), "preemption", "retry", None),
    ("spot reclaimed", logs("aws-node-termination-handler: spot interruption notice received, draining", exitcode=143), "preemption", "retry", None),
    # memory
    ("cuda oom", logs("[rank7]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 7 has a total capacity of 79.10 GiB", *NCCL_FOLLOWERS, exitcode=1), "oom_gpu", "user_code", None),
    ("oom killer", dmesg("[7.1] Out of memory: Killed process 9121 (python) total-vm:1kB, anon-rss:1kB", logs=torchrun(-9, "Signal 9 (SIGKILL) received by PID 90211"), exitcode=-9), "oom_host", "user_code", None),
    ("pod oom", logs("    Last State:     Terminated", "      Reason:       OOMKilled", "      Exit Code:    137", exitcode=137), "oom_host", "user_code", None),
    ("slurm oom", logs("slurmstepd: error: Detected 2 oom_kill events in StepId=9.0. Some of the step tasks have been OOM Killed.", "srun: error: gpu-a-12: task 3: Out Of Memory"), "oom_host", "user_code", None),
    ("shm through the loader", logs("RuntimeError: DataLoader worker (pid 912) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."), "container_config", "human", None),
    ("open files", logs("OSError: [Errno 24] Too many open files: '/data/x'"), "container_config", "human", None),
    # storage
    ("stale handle", logs("[rank2]: OSError: [Errno 116] Stale file handle: '/nfs/ckpt/step_10'", *NCCL_FOLLOWERS), "storage", "storage", None),
    ("lustre evicts", dmesg("[8.1] LustreError: 11-0: scratch-OST0007-osc-ffff: operation ost_write to node 10.0.0.4@o2ib failed: rc = -107", "[8.2] LustreError: 167-0: scratch-OST0007: This client was evicted by scratch-OST0007"), "storage", "storage", None),
    ("checkpoint cut short", logs("Traceback (most recent call last):", '  File "/app/train.py", line 9, in load', "    torch.load(path)", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"), "storage", "storage", None),
    ("quota", logs("OSError: [Errno 122] Disk quota exceeded: '/home/me/ckpt'"), "storage", "storage", None),
    ("object store", logs("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): Please reduce your request rate."), "storage", "storage", None),
    ("nfs silent", dmesg("[8.1] nfs: server filer01 not responding, still trying", "[130.2] INFO: task python:8812 blocked for more than 120 seconds.", "[130.3]  rpc_wait_bit_killable+0x1e/0x90 [sunrpc]"), "storage", "storage", None),
    # programs
    ("key error among followers", logs("[rank3]: Traceback (most recent call last):", '[rank3]:   File "/home/u/train.py", line 40, in main', "[rank3]: KeyError: 'labels'", *NCCL_FOLLOWERS, exitcode=1), "user_code", "user_code", None),
    ("index out of range on the device", logs("../aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed.", "RuntimeError: CUDA error: device-side assert triggered"), "user_code", "user_code", None),
    ("unknown option", logs("usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --learning-rate 3", *torchrun(2), exitcode=2), "user_config", "user_code", None),
    ("sizes do not divide", logs("AssertionError: world size (24) is not divisible by total_model_size (16)"), "user_config", "user_code", None),
    ("missing variable", logs("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set"), "user_config", "user_code", None),
    ("different operations", logs(WATCHDOG.format(rank=0, seq=77, op="ALLREDUCE", n=1), WATCHDOG.format(rank=1, seq=77, op="BROADCAST", n=1)), "user_code", "user_code", None),
    ("all wait in the same", logs(*[WATCHDOG.format(rank=rank, seq=77, op="ALLREDUCE", n=1) for rank in range(4)], exitcode=-6), "unknown", "human", None),
    ("fingerprints differ", logs("RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=8, OpType=BARRIER), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=8, OpType=ALLREDUCE)."), "user_code", "user_code", None),
    ("broken image", logs("PIL.UnidentifiedImageError: cannot identify image file '/data/0001.jpg'"), "data", "user_code", None),
    ("broken shard", logs("ValueError: corrupt shard /data/train-00012.tar at offset 881"), "data", "user_code", None),
    ("undefined symbol", logs("ImportError: /usr/lib/flash_attn_2_cuda.cpython-311.so: undefined symbol: _ZN3c105ErrorC2E"), "framework_bug", "human", None),
    ("segfault in one rank", logs(*torchrun(-11, "Signal 11 (SIGSEGV) received by PID 90211"), exitcode=-11), "framework_bug", "human", None),
    ("nccl versions", logs("NCCL WARN Mismatched NCCL version detected : rank 0 2.18.3 rank 1 2.19.4"), "framework_bug", "human", None),
    ("loss not finite", logs("iteration 120/ 5000 | lm loss: nan | grad norm: nan |", "AssertionError: found NaN in local grad norm in backward pass"), "numerics", "human", None),
    ("scale at its floor", logs("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."), "numerics", "human", None),
    # hang_dataloader, sdc, straggler, recent changes
    ("loader times out", logs("[rank5]: RuntimeError: DataLoader timed out after 600 seconds", *NCCL_FOLLOWERS), "hang_dataloader", "retry", None),
    ("loader is stuck", facts(dataloader={"rank5": "stuck, no batch for 900 s"}), "hang_dataloader", "retry", None),
    ("replay differs", facts(replay={"gpu-a-12": "bitwise mismatch in layer 3"}, others="equal"), "sdc", "evict", "gpu-a-12"),
    ("one host computes other numbers", logs("[check] gpu-a-12: GEMM verification failed: mismatch at 12 elements", "[check] gpu-a-13: GEMM ok"), "sdc", "evict", "gpu-a-12"),
    ("one slow host", facts(step_time_s={"gpu-a-10": 1.01, "gpu-a-11": 1.0, "gpu-a-12": 1.42, "gpu-a-13": 0.99, "gpu-a-14": 1.0}), "straggler", "evict", "gpu-a-12"),
    ("low throughput of one", facts(tflops={"gpu-a-10": 410, "gpu-a-11": 408, "gpu-a-12": 300, "gpu-a-13": 411}), "straggler", "evict", "gpu-a-12"),
    ("nobody is slow", facts(step_time_s={"gpu-a-10": 1.01, "gpu-a-11": 1.0, "gpu-a-12": 1.02, "gpu-a-13": 0.99}), "none", "none", None),
    ("throttled", facts(throttle_reasons={"gpu-a-12": "hw_thermal_slowdown"}), "straggler", "evict", "gpu-a-12"),
    ("after a commit", {"logs": ["TypeError: forward() got an unexpected keyword argument 'mask'"], "exitcode": 1, "metrics": {"recent_change": "commit 8a1f merged 10 minutes before the restart"}}, "user_code", "rollback_user_code", None),
    ("after an upgrade", {"logs": ["ImportError: cannot import name 'top_k' from 'sampler' (/app/sampler.py)"], "exitcode": 1, "metrics": {"previous_version": "works"}}, "user_code", "rollback_user_code", None),
    ("hardware fails after a commit", {"dmesg": ["[1.1] NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off the bus."], "collected_from": {"dmesg": "gpu-a-12"}, "metrics": {"recent_change": "commit 8a1f"}}, "gpu_hardware", "evict", "gpu-a-12"),
    # numbers
    ("spike that comes back", facts(loss=[2.1, 2.1, 2.2, 6.4, 3.0, 2.3, 2.1]), "none", "none", None),
    ("loss runs away", facts(lm_loss=[2.1, 2.1, 2.2, 3.4, 4.8, 6.1, 7.2]), "numerics", "human", None),
    # nothing
    ("a finished job", logs("[after training is done] datetime: 2024-01-01 00:00:00", exitcode=0), "none", "none", None),
    ("died without a word", {"exitcode": 1}, "unknown", "human", None),
    ("only followers", {"logs": NCCL_FOLLOWERS[:2], "exitcode": 1}, "network_ib", "human", None),
    # once more, all kinds mixed
    ('dist store clients', {'logs': ['torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 clients joined.'], 'exitcode': 1}, 'unknown', 'human', None),
    ('cublas init', {'logs': ['RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`'], 'exitcode': 1}, 'framework_bug', 'human', None),
    ('hf tokenizers warn + keyerror', {'logs': ['huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...', 'Traceback (most recent call last):', '  File "/w/train.py", line 3, in <module>', "KeyError: 'input_ids'"], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('nccl unhandled oom', {'logs': ["node-4:1:2 [0] include/alloc.h:185 NCCL WARN Cuda failure 2 'out of memory'", 'torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error'], 'exitcode': 1}, 'oom_gpu', 'user_code', None),
    ('llama oom python', {'logs': ['RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 38.1 GiB already allocated)'], 'exitcode': 1}, 'oom_gpu', 'user_code', None),
    ('loss nan metric', {'metrics': {'loss': [2.0, 1.9, float("nan"), float("nan")]}}, 'numerics', 'human', None),
    ('grad norm explode text', {'metrics': {'loss': 'diverges at step 3000 with bf16 optimizer states, fp32 ok'}}, 'numerics', 'human', None),
    ('nan only on one host', {'metrics': {'nan': 'only on the same host node-12, replay on another node is clean'}}, 'sdc', 'evict', None),
    ('dual run', {'metrics': {'replay': 'gradients differ between two runs on node-9, equal on node-10'}}, 'sdc', 'human', None),
    ('eud', {'metrics': {'dcgm_diag': {'node-5': 'fail: memory'}}}, 'sdc', 'evict', None),
    ('dataloader metric', {'metrics': {'data_time_s': 1700, 'rank': 3}}, 'hang_dataloader', 'retry', None),
    ('straggler ranks', {'metrics': {'step_ms_per_rank': {'0': 500, '1': 505, '2': 498, '3': 720, '4': 501, '5': 499}}}, 'straggler', 'evict', None),
    ('mfu decline', {'metrics': {'mfu': [0.41, 0.41, 0.41, 0.33, 0.32, 0.33]}}, 'straggler', 'human', None),
    ('dip', {'metrics': {'tokens_per_s': [100, 101, 100, 60, 99, 100, 101]}}, 'none', 'none', None),
    ('fs hang log', {'logs': ['rank 0: checkpoint save stuck for 1900 s writing to /lustre/ckpt'], 'exitcode': None, 'metrics': {'lustre': 'OST0004 unreachable'}}, 'storage', 'storage', None),
    ('spot', {'logs': ['{"action": "terminate", "time": "2024"} spot interruption warning received'], 'exitcode': 143}, 'preemption', 'retry', None),
    ('sigterm launcher', {'logs': ['torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15'], 'exitcode': 1}, 'preemption', 'retry', None),
    ('slurm cancelled', {'logs': ['slurmstepd: error: *** JOB 123 ON node-2 CANCELLED AT 2024-02-02T10:00:00 ***'], 'exitcode': 143}, 'preemption', 'retry', None),
    ('mce fatal', {'dmesg': ['[ 12.1] mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 1: be00000000800400', '[ 12.2] Kernel panic - not syncing: Fatal machine check'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'host_os', 'evict', None),
    ('edac ue', {'dmesg': ['EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'host_os', 'evict', None),
    ('nvme ro', {'dmesg': ['EXT4-fs error (device nvme0n1p2): ext4_journal_check_start:83: comm python: Detected aborted journal', 'EXT4-fs (nvme0n1p2): Remounting filesystem read-only'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'host_os', 'evict', None),
    ('pytorch ImportError old glibc', {'logs': ["ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found"]}, 'framework_bug', 'human', None),
    ('triton compile', {'logs': ["torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nRuntimeError"]}, 'framework_bug', 'human', None),
    ('flash attn illegal', {'logs': ['RuntimeError: CUDA error: an illegal memory access was encountered'], 'metrics': {'flash_attn_2.5': 'fails', 'previous_version': 'works'}, 'exitcode': 1}, 'user_code', 'rollback_user_code', None),
    ('deps', {'logs': ["AttributeError: module 'numpy' has no attribute 'bool8'"], 'metrics': {'dependency_change': 'numpy 1.26 -> 2.0 in the last image'}, 'exitcode': 1}, 'user_code', 'rollback_user_code', None),
    ('rollback loss', {'metrics': {'loss': 'rises since the deploy of commit 9ab1', 'rollback': 'loss is fine again with commit 8f'}}, 'numerics', 'rollback_user_code', None),
    ('hydra', {'logs': ["hydra.errors.ConfigCompositionException: Could not override 'model.foo'."]}, 'user_config', 'user_code', None),
    ('megatron assert', {'logs': ['    assert args.hidden_size % args.num_attention_heads == 0', 'AssertionError']}, 'user_code', 'user_code', None),
    ('ds batch', {'logs': ['AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 1 * 4']}, 'user_config', 'user_code', None),
    ('port used', {'logs': ['RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).']}, 'user_config', 'user_code', None),
    ('lost peer gloo only', {'logs': ['RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.2]:3312'], 'exitcode': 1}, 'unknown', 'human', None),
    ('ib completion single', {'logs': ['node-2:3:4 [0] NCCL WARN NET/IB : Got completion from peer node-7<3333> with error 12, opcode 0, len 0, vendor err 129'], 'exitcode': 1}, 'network_ib', 'human', None),
    ('ib completion many', {'logs': ['node-1:3:4 [0] NCCL WARN NET/IB : Got completion from peer node-7<3333> with error 12, opcode 0, len 0, vendor err 129', 'node-2:3:4 [0] NCCL WARN NET/IB : Got completion from peer node-7<3333> with error 12, opcode 0, len 0, vendor err 129', 'node-3:3:4 [0] NCCL WARN NET/IB : Got completion from peer node-7<3333> with error 12, opcode 0, len 0, vendor err 129', 'node-4:3:4 [0] NCCL WARN NET/IB : Got completion from peer node-7<3333> with error 12, opcode 0, len 0, vendor err 129']}, 'network_ib', 'evict', None),
    ('xid 109 once', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 109, pid=1, name=python, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x1'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'retry', None),
    ('xid 32', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 32, pid=1, name=python, Channel ID 0000001a intr0 00040000'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'retry', None),
    ('xid 92', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 92, High single-bit ECC error rate'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('xid unknown', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 113, foo'], 'exitcode': -6, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'unknown', 'human', None),
    ('xid 45 after kill', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 45, pid=1, name=python, Ch 00000008'], 'exitcode': -9, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'oom_host', 'user_code', None),
    ('mlx5 hot', {'dmesg': ['mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('unplugged mgmt', {'dmesg': ['mlx5_core 0000:5c:00.0: Port module event: module 0, Cable unplugged'], 'metrics': {'port_use': 'management, no training traffic'}, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('fabric mgr log', {'logs': ['[Feb 27 2025 15:10:02] [ERROR] [tid 127] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 61'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'nvlink_fabric', 'evict', None),
    ('quota home', {'logs': ['OSError: [Errno 122] Disk quota exceeded']}, 'storage', 'storage', None),
    ('ckpt safetensors', {'logs': ['safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge']}, 'storage', 'storage', None),
    ('image', {'logs': ['  Warning  Failed     2m  kubelet  Failed to pull image "x": rpc error', '  Warning  Failed 2m kubelet Error: ImagePullBackOff']}, 'container_config', 'human', None),
    ('arrow', {'logs': ['pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.']}, 'data', 'user_code', None),
    ('bad token ids metric', {'metrics': {'note': 'same batch gives the spike again on other hosts, skipping the batch helps'}}, 'data', 'user_code', None),
    ('gpu missing', {'logs': ['node-9: nhc: ERROR: Health check failed: check_nvsmi_healthmon: GPU missing'], 'exitcode': 1}, 'gpu_hardware', 'evict', None),
    ('ras running', {'ras': ['Group     Comms     Nodes     Ranks', '0 1 4 8 32 32 RUNNING OK']}, 'none', 'none', None),
    ('tcpstore', {'logs': ['[rank3]: torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (node-0, 29500).'], 'exitcode': 1}, 'unknown', 'human', None),
    ('no route', {'logs': ['node-2:1:2 [0] NCCL WARN socketStartConnect: Connect to 10.2.0.7<41999> failed : No route to host'], 'exitcode': 1}, 'network_config', 'human', None),
    ('moe index', {'logs': ['RuntimeError: CUDA error: device-side assert triggered'], 'metrics': {'last_change': 'none'}, 'exitcode': 1}, 'user_code', 'user_code', None),
    ('segv nccl kernel', {'dmesg': ['pt_main_thread[2536443]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in libnccl.so.2[7f7c7ac00000+d3d3000]'], 'exitcode': -11}, 'framework_bug', 'human', None),
    ('restart helped', {'logs': ['[rank2]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1)'], 'metrics': {'after_restart': 'works'}, 'exitcode': -6}, 'unknown', 'retry', None),
    ('temps', {'metrics': {'gpu_temp_c': {'node-1': 61, 'node-2': 64, 'node-3': 93}, 'clock_mhz': {'node-1': 1980, 'node-2': 1980, 'node-3': 1200}}}, 'straggler', 'evict', None),
    ('watchdog lagging rank', {'logs': ['[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=50, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, Timeout(ms)=1)', '[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=51, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, Timeout(ms)=1)'], 'exitcode': -6}, 'unknown', 'human', None),
    ('barrier', {'logs': ['RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 300000 ms'], 'exitcode': 1}, 'unknown', 'human', None),
    ('step exit', {'logs': ['srun: error: node-7: task 12: Segmentation fault (core dumped)', 'srun: Terminating StepId=1.0']}, 'framework_bug', 'human', None),
    ('ok log', {'logs': ['Epoch 3: 100%|####| 10/10', 'Training completed in 3 h'], 'exitcode': 0}, 'none', 'none', None),
    ('warnings', {'logs': ['UserWarning: Grad strides do not match bucket view strides.', '[W101 ProcessGroupNCCL.cpp:1] Warning: WARNING: destroy_process_group() was not called before program exit'], 'exitcode': 0}, 'none', 'none', None),
    ('unplugged unused down', {'dmesg': ['mlx5_core 0000:41:00.1: Port module event: module 1, Cable unplugged'], 'metrics': {'ib_port_state': 'DOWN', 'port_role': 'management, unused by the job'}, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('sdc disk', {'dmesg': ['[ 2.1] sd 0:0:2:0: [sdc] Attached SCSI disk'], 'exitcode': 0, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('xid counts', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 31, pid=1, name=python, Ch 00000010, intr 1. MMU Fault'], 'metrics': {'xid31_last_30_days': {'node-4': 6, 'node-5': 0, 'node-6': 1}}, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'evict', None),
    ('reboot note', {'metrics': {'reboot': 'did not help'}, 'exitcode': 1}, 'unknown', 'human', None),
    ('late hw after sw', {'logs': ['TypeError: f() missing 1 required positional argument', '[rank1]: torch.distributed.DistBackendError: NCCL error'], 'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 45, pid=1, name=python, Ch 00000008', '[1.2] NVRM: Xid (PCI:0000:5d:00): 43, pid=1, name=python, Ch 00000008'], 'exitcode': 1, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'user_code', 'user_code', None),
    ('gpu idle nonhang', {'metrics': {'gpu_util_pct': [0, 100, 100, 100]}}, 'none', 'none', None),
    ('nfs oserror in follow', {'logs': ['OSError: [Errno 5] Input/output error', '[rank3]: ncclRemoteError: A call failed'], 'exitcode': 1}, 'storage', 'storage', None),
    ('thermal nvsmi not active', {'logs': ['        HW Thermal Slowdown               : Not Active', '        SW Power Cap                  : Active'], 'exitcode': 0}, 'none', 'none', None),
    ('xid 79 3 gpus on one host', {'dmesg': ['[1.0] NVRM: Xid (PCI:0000:0d:00): 79, GPU has fallen off the bus.', '[1.1] NVRM: Xid (PCI:0000:1d:00): 79, GPU has fallen off the bus.', '[1.2] NVRM: Xid (PCI:0000:2d:00): 79, GPU has fallen off the bus.', '[1.3] NVRM: Xid (PCI:0000:3d:00): 79, GPU has fallen off the bus.'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'evict', None),
    ('two hosts 79', {'dmesg': ['node-0: [1.0] NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.', 'node-1: [1.1] NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.']}, 'gpu_hardware', 'evict', None),
    ('rank OOM vs others nccl timeouts', {'logs': ['[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB', '[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=51, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, Timeout(ms)=1)', '[rank2]:[E] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=52, OpType=ALLGATHER, NumelIn=5, NumelOut=5, Timeout(ms)=1)'], 'exitcode': -6}, 'oom_gpu', 'user_code', None),
    ('ecc corrected', {'dmesg': ['EDAC MC0: 1 CE memory read error on CPU_SrcID#0'], 'exitcode': 0, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('user sigint', {'logs': ['^CTraceback (most recent call last):', 'KeyboardInterrupt'], 'exitcode': 130}, 'unknown', 'human', None),
    ('loader killed by oom', {'logs': ['RuntimeError: DataLoader worker (pid 31337) is killed by signal: Killed.'], 'dmesg': ['[9] Memory cgroup out of memory: Killed process 31337 (python)'], 'exitcode': 1}, 'oom_host', 'user_code', None),
    ('hf dataset offline', {'logs': ["requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api"]}, 'storage', 'storage', None),
    ('gcs', {'logs': ['google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com']}, 'storage', 'storage', None),
    ('mfs eio in worker', {'logs': ['OSError: Caught OSError in DataLoader worker process 3.', 'Original Traceback (most recent call last):', 'OSError: [Errno 5] Input/output error']}, 'storage', 'storage', None),
    ('fsdp mixed dtype', {'logs': ['[rank0]: ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32']}, 'user_code', 'user_code', None),
    ('lightning', {'logs': ['lightning_fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!']}, 'user_config', 'user_code', None),
    ('cpu illegal instr', {'logs': ['Fatal Python error: Illegal instruction'], 'exitcode': -4}, 'framework_bug', 'human', None),
    ('nccl 2.19 bug assert', {'logs': ['node-1:1:2 [0] proxy.cc:1400 NCCL WARN Assertion failed: x'], 'exitcode': -6}, 'framework_bug', 'human', None),
    ('imex', {'logs': ['CUDA error: CUDA_ERROR_NOT_PERMITTED', 'nvidia-imex: IMEX daemon not ready on node 4'], 'exitcode': 1}, 'nvlink_fabric', 'human', None),
    ('disk full local', {'logs': ["OSError: [Errno 28] No space left on device: '/tmp/torchinductor/x'"], 'exitcode': 1, 'collected_from': {'logs': 'node-4'}}, 'host_os', 'human', None),
    ('no space plain', {'logs': ['OSError: [Errno 28] No space left on device'], 'exitcode': 1}, 'storage', 'storage', None),
    ('slow nodes two on one host', {'metrics': {'iter_time': {'node-1/gpu0': 1, 'node-1/gpu1': 1.01, 'node-2/gpu0': 1.5, 'node-2/gpu1': 1.52, 'node-3/gpu0': 1.0, 'node-3/gpu1': 1.0, 'node-4/gpu0': 1.0, 'node-4/gpu1': 1.0, 'node-5/gpu0': 1.0, 'node-5/gpu1': 1.0, 'node-6/gpu0': 1.0, 'node-6/gpu1': 1.0, 'node-7/gpu0': 1.0, 'node-7/gpu1': 1.0, 'node-8/gpu0': 1.0, 'node-8/gpu1': 1.0, 'node-9/gpu0': 1.0, 'node-9/gpu1': 1.0, 'node-10/gpu0': 1.0, 'node-10/gpu1': 1.0}}}, 'straggler', 'evict', None),
    ('m4 nccl ib down several nodes', {'logs': ['node-11:2:3 [0] NCCL WARN NET/IB : Got completion from peer 10.0.1.4<1> with error 12, opcode 1, len 0, vendor err 129', 'node-12:2:3 [0] NCCL WARN NET/IB : Got completion from peer 10.0.1.4<1> with error 12, opcode 1, len 0, vendor err 129'], 'exitcode': 1}, 'network_ib', 'human', None),
    ('gpu throttle metric prose', {'metrics': {'step_time': '10 % slower since 3 h', 'nvidia_smi': 'node-13 gpu2 at 1005 MHz, all others 1410 MHz'}}, 'straggler', 'evict', None),
    ('hf save ckpt hang s3', {'logs': ['INFO saving checkpoint', 'botocore.exceptions.ConnectionClosedError: Connection was closed before we received a valid response from endpoint URL: "https://x.s3.amazonaws.com"'], 'exitcode': 1}, 'storage', 'storage', None),
    ('nan after hw ecc', {'logs': ['iteration 100 | lm loss: nan |'], 'dmesg': ['NVRM: Xid (PCI:0000:5d:00): 94, pid=1, Contained: SM'], 'exitcode': 1, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_memory_ecc', 'evict', None),
    ('rank lost without trace', {'logs': ['W0101 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 11 closing signal SIGTERM', 'E0101 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 5 (pid: 12) of binary: /usr/bin/python'], 'exitcode': -9}, 'oom_host', 'user_code', None),
    ('bf16 loss diverge', {'metrics': {'lm_loss': [3.1, 2.9, 2.8, 2.8, 2.9, 3.9, 5.5, 6.8], 'precision': 'fp16'}}, 'numerics', 'human', None),
    ('lost GPU smi', {'logs': ['Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error', 'No devices were found'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'evict', None),
    ('nvsm', {'logs': ['RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable'], 'metrics': {'nvidia_smi': 'GPU 3 ERR!'}, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'gpu_hardware', 'evict', None),
    ('cuda 802 all', {'logs': ['node-0: RuntimeError: Error 802: system not yet initialized', 'node-1: RuntimeError: Error 802: system not yet initialized', 'node-2: RuntimeError: Error 802: system not yet initialized', 'node-3: RuntimeError: Error 802: system not yet initialized']}, 'nvlink_fabric', 'human', None),
    ('xid119 two hosts same driver', {'dmesg': ['node-1: [1.1] NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=python, Timeout after 45s', 'node-2: [1.1] NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=python, Timeout after 45s', 'node-3: [1.1] NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=python, Timeout after 45s'], 'metrics': {'driver': '525.60.13 on all nodes'}}, 'driver_gsp', 'human', None),
    ('wrong batch of tokens', {'logs': ['RuntimeError: CUDA error: device-side assert triggered', 'Indexing.cu:1: block: [1,0,0], thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.'], 'exitcode': -6}, 'user_code', 'user_code', None),
    ('slurm requeue node drain', {'logs': ['slurmctld: update_node: node node-8 reason set to: Kill task failed', 'slurmctld: update_node: node node-8 state set to DRAINING']}, 'host_os', 'evict', None),
    ('job time limit k8s', {'logs': ['Warning  DeadlineExceeded  job/train  Job was active longer than specified deadline'], 'exitcode': 143}, 'preemption', 'retry', None),
    ('cgroup oom dmesg', {'dmesg': ['[1.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0-1,oom_memcg=/kubepods/pod1,task=python,pid=2', '[1.2] Memory cgroup out of memory: Killed process 2 (python)'], 'exitcode': 137, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'oom_host', 'user_code', None),
    ('many hosts oom killer', {'dmesg': ['node-0: [1.2] Out of memory: Killed process 2 (python)', 'node-1: [1.2] Out of memory: Killed process 2 (python)', 'node-2: [1.2] Out of memory: Killed process 2 (python)', 'node-3: [1.2] Out of memory: Killed process 2 (python)', 'node-4: [1.2] Out of memory: Killed process 2 (python)'], 'exitcode': -9}, 'oom_host', 'user_code', None),
    ('lustre mount missing', {'logs': ["FileNotFoundError: [Errno 2] No such file or directory: '/lustre/data/train.bin'"], 'metrics': {'mount': '/lustre not mounted on node-4'}, 'exitcode': 1}, 'storage', 'storage', None),
    ('ckpt size zero', {'logs': ['RuntimeError: unexpected EOF, expected 4211 more bytes. The file might be corrupted.'], 'exitcode': 1}, 'storage', 'storage', None),
    ('ib down metric only', {'metrics': {'ibstat': {'node-6/mlx5_2': 'State: Down, Physical state: Disabled'}}}, 'network_ib', 'evict', None),
    ('mlx5 gids', {'logs': ['NCCL WARN NET/IB : Unable to find GID index for RoCE v2'], 'exitcode': 1}, 'network_config', 'human', None),
    ('port flapping metric', {'metrics': {'link_flaps': {'node-6': 12, 'node-7': 0}}}, 'network_ib', 'evict', None),
    ('nccl timeouts w fabric cause unknown', {'logs': ['[rank9]:[E] [PG ID 3 PG GUID 12 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLTOALL_BASE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)'], 'exitcode': -6}, 'unknown', 'human', None),
    ('python gc leak host', {'metrics': {'rss_gib': [20, 40, 60, 80, 100, 120], 'mem_total_gib': 128}, 'exitcode': -9}, 'oom_host', 'user_code', None),
    ('gpu mem grows list', {'logs': ['RuntimeError: CUDA error: unspecified launch failure'], 'metrics': {'gpu_mem_gib': [40, 50, 60, 70, 78]}, 'exitcode': 1}, 'oom_gpu', 'user_code', None),
    ('uneven inputs', {'logs': ['RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: CollectiveFingerPrint(OpType=ALLREDUCE) but Rank 0 is running collective: CollectiveFingerPrint(OpType=BROADCAST)'], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('torch version mix', {'logs': ['RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA major versions. PyTorch has CUDA Version=12.1 and torchvision has CUDA Version=11.8.'], 'exitcode': 1}, 'framework_bug', 'human', None),
    ('apex missing', {'logs': ["ModuleNotFoundError: No module named 'apex'"], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('gpu 3 slower log', {'logs': ['[straggler detection] node-7 GPU 3 is 1.3x slower than the median']}, 'straggler', 'evict', None),
    ('power brake', {'logs': ['    HW Power Brake Slowdown           : Active'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'straggler', 'evict', None),
    ('nvme timeouts', {'dmesg': ['[1.1] nvme nvme1: I/O 12 QID 3 timeout, aborting'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'host_os', 'evict', None),
    ('pod evicted taint', {'logs': ['Normal  TaintManagerEviction  pod/train-2  Marking for deletion Pod default/train-2'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'host_os', 'evict', None),
    ('GCE maintenance', {'logs': ['compute.instances.hostError node-5: Instance terminated due to host error'], 'exitcode': 143}, 'host_os', 'evict', None),
    ('azure eviction', {'logs': ['Scheduled event: Preempt, Resources: node-5'], 'exitcode': 143}, 'preemption', 'retry', None),
    ('aws spot json', {'logs': ['{"detail-type":"EC2 Spot Instance Interruption Warning","detail":{"instance-id":"i-1","instance-action":"terminate"}}']}, 'preemption', 'retry', None),
    ('unhealthy NVLink topo', {'metrics': {'nvlink_status': {'node-3/gpu4': 'link 7 inactive'}, 'all_reduce_busbw_gbps': {'node-1': 480, 'node-2': 479, 'node-3': 210}}}, 'nvlink_fabric', 'evict', None),
    ('nccl net error + oom on rank 3 later order', {'logs': ['[rank0]: torch.distributed.DistBackendError: NCCL error in: x, remote process exited or there was a network error', '[rank0]: socketProgressOpt: Call to recv from node-9<33> failed : Connection reset by peer', '[rank3]: torch.OutOfMemoryError: CUDA out of memory.'], 'exitcode': 1}, 'oom_gpu', 'user_code', None),
    ('ib error and xid same host', {'dmesg': ['node-2: [1.1] mlx5_core 0000:c3:00.0: health compromised - reached miss count', 'node-3: [1.1] NVRM: Xid (PCI:0000:5d:00): 63, pid=1, Row Remapper: New row marked']}, 'network_ib', 'evict', None),
    ('loss spike with xid63', {'dmesg': ['NVRM: Xid (PCI:0000:5d:00): 63, pid=1, Row Remapper: New row marked'], 'metrics': {'loss': [2, 2, 2.1, 7, 4, 2.2, 2.0]}, 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('numerics with bf16 text', {'logs': ['RuntimeError: Loss is nan, stopping training'], 'exitcode': 1}, 'numerics', 'human', None),
    ('wandb only', {'logs': ['wandb: ERROR Error while calling W&B API: context deadline exceeded', 'wandb: Network error (ConnectionError), entering retry loop.'], 'exitcode': 0}, 'none', 'none', None),
    ('deprecated warnings with error word', {'logs': ['[W] torch/library.py: UserWarning: An error handler was overridden', 'INFO: no errors found'], 'exitcode': 0}, 'none', 'none', None),
    ('python assertion', {'logs': ['AssertionError: loss mismatch between ranks'], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('conn reset s3', {'logs': ['ConnectionResetError: [Errno 104] Connection reset by peer', 'botocore.exceptions.HTTPClientError: An HTTP Client raised an unhandled exception'], 'exitcode': 1}, 'storage', 'storage', None),
    ('ckpt disk text', {'logs': ['RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470', 'OSError: [Errno 28] No space left on device'], 'exitcode': 1}, 'storage', 'storage', None),
    ('nvlink xid74 alive', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 74, pid=1, NVLink: fatal error detected on link 6(0x0, 0x0, 0x10000, 0x0)'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('dgx power cap', {'dmesg': ['[1.1] NVRM: Xid (PCI:0000:5d:00): 162, foo'], 'collected_from': {'logs': 'node-4', 'dmesg': 'node-4'}}, 'none', 'none', None),
    ('gpu temp ok', {'metrics': {'gpu_temp_c': [61, 63, 62]}}, 'none', 'none', None),
    ('image pull', {'logs': ['Back-off pulling image "x/y:z"', 'ErrImagePull']}, 'container_config', 'human', None),
    ('kill by admin', {'logs': ['slurmstepd: error: *** JOB 123 ON node-2 CANCELLED AT 2024-02-02T10:00:00 by 1001 ***'], 'exitcode': 143}, 'preemption', 'retry', None),
    ('ulimit core', {'logs': ['RuntimeError: unable to open shared memory object </torch_123_1> in read/write mode: Too many open files (24)']}, 'container_config', 'human', None),
    ('fork oom', {'logs': ['OSError: [Errno 12] Cannot allocate memory']}, 'oom_host', 'user_code', None),
    ('triton cache stale', {'logs': ["OSError: [Errno 116] Stale file handle: '/home/u/.triton/cache/x'"]}, 'storage', 'storage', None),
    ('label range cpu', {'logs': ['IndexError: Target 1001 is out of bounds.'], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('tokenizer oob', {'logs': ['IndexError: index out of range in self'], 'exitcode': 1}, 'user_code', 'user_code', None),
    ('jax', {'logs': ['jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.']}, 'oom_gpu', 'user_code', None),
    ('host rebooted', {'logs': ['slurmctld: Node node-7 unexpectedly rebooted (12345 < 23456)']}, 'host_os', 'evict', None),
    ('cpu mce in syslog', {'dmesg': ['May 19 07:08:57 node-9 kernel: mce: [Hardware Error]: Machine check events logged'], 'exitcode': 0}, 'none', 'none', None),
    ('mismatched python', {'logs': ['ValueError: unsupported pickle protocol: 5'], 'exitcode': 1}, 'user_code', 'user_code', None),
)  # fmt: skip
