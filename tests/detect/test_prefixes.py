"""Prefixes of ranks, hosts and kernels in the forms that collectors leave."""

from __future__ import annotations

import pytest

from evertrain.detect.prefixes import clock, looks_like_host, origin


@pytest.mark.parametrize(
    ("raw", "host", "rank", "text"),
    [
        ("[rank3]: KeyError: 1", None, 3, "KeyError: 1"),
        ("[default2]:KeyError: 1", None, 2, "KeyError: 1"),
        ("12: KeyError: 1", None, 12, "KeyError: 1"),
        ("node-12: KeyError: 1", "node-12", None, "KeyError: 1"),
        ("gpu-a-3:11:22 [4] NCCL WARN x", "gpu-a-3", None, "NCCL WARN x"),
        ("[2026-04-22 21:34:20] pod-0:20:22 [0] NCCL WARN x", "pod-0", None, "NCCL WARN x"),
        ("(RayTrainWorker pid=12, ip=10.1.2.3) KeyError: 1", "10.1.2.3", None, "KeyError: 1"),
        ("[node-01:157  :4:419] Caught signal 11", "node-01", None, "Caught signal 11"),
        (
            "17:34:36.5 [task162 rank1 node-r10-4] failed",
            "node-r10-4",
            None,
            "17:34:36.5 [task162 rank1 node-r10-4] failed",
        ),
        ("KeyError: 1", None, None, "KeyError: 1"),
        ("step12: loss", None, None, "step12: loss"),
        ("nvidia-nvswitch3: SXid", None, None, "nvidia-nvswitch3: SXid"),
        ("[ERROR] node-3: x", "node-3", None, "x"),
    ],
)
def test_origin(raw: str, host: str | None, rank: int | None, text: str) -> None:
    found = origin(raw)
    assert (found.host, found.rank, found.text) == (host, rank, text)


@pytest.mark.parametrize(
    ("raw", "host"),
    [
        ("[111111.111] NVRM: x", None),
        ("[   12.5] NVRM: x", None),
        ("[Sun Feb 23 16:24:18 2025] NVRM: x", None),
        ("kern  :warn  : 2025-01-21T04:41:44,283302+00:00 NVRM: x", None),
        ("May 19 07:08:57 node-7 kernel: [680111.646286] NVRM: x", "node-7"),
        ("2025-05-19T07:08:57.1+00:00 node-7 kernel: NVRM: x", "node-7"),
        ("[  +0.000316] NVRM: x", None),
        ("kernel: NVRM: x", None),
        ("node-7 kernel: NVRM: x", "node-7"),
        ("node-7: [412201.334410] NVRM: x", "node-7"),
        ("6,1234,5678,-;NVRM: x", None),
    ],
)
def test_kernel_prefixes(raw: str, host: str | None) -> None:
    found = origin(raw)
    assert (found.host, found.text, found.is_kernel) == (host, "NVRM: x", True)


def test_names_of_devices_and_counters_are_no_hosts() -> None:
    for name in ("rank3", "ib6", "mlx5_0", "eth0", "epoch2", "GPU4", "bf16", "nvme0"):
        assert not looks_like_host(name)
    for name in ("node-3", "10.0.0.4", "ip-10-0-0-4.internal", "gpu-b2-c3", "cn0417"):
        assert looks_like_host(name)


def test_clock() -> None:
    day = clock("2025-03-11_18:33:20")
    assert day is not None
    later, earlier = clock("2025-03-02 00:00:01"), clock("2025-03-01T23:59:59.5")
    assert later is not None and earlier is not None and later - earlier == pytest.approx(1.5)
    assert clock("[ 12.25] x") == 12.25
    assert clock("no time") is None
