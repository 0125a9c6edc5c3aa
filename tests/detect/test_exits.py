"""Who failed, and who merely lost the connection to it."""

from __future__ import annotations

import pytest

from evertrain.detect.exits import category, cause, is_follower
from evertrain.model.report import RankError

IN_TORCH = 'File "/v/torch/distributed/distributed_c10d.py", line 3013, in all_reduce'


def error(type: str, message: str = "", traceback: str = IN_TORCH) -> RankError:
    return RankError(type=type, message=message, traceback=traceback)


@pytest.mark.parametrize(
    "seen",
    [
        error(
            "RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711"
        ),
        error("RuntimeError", "Application timeout caused pair closure"),
        error("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 3"),
        error("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
        error("RuntimeError", "Gloo connectFullMesh failed with [...]: Connection refused"),
        error("RuntimeError", "Connection reset by peer", 'File "/v/torch/autograd/graph.py", line 829, in backward'),
    ],
)
def test_lost_connections_are_followers(seen: RankError) -> None:
    assert is_follower(1, seen, "")


@pytest.mark.parametrize(
    "seen",
    [
        error("ValueError", "boom", 'File "train.py", line 3'),
        error(
            "ConnectionResetError", "[Errno 104] Connection reset by peer", 'File "/v/requests/adapters.py", line 682'
        ),
        error("RuntimeError", "shape '[2]' is invalid for input of size 3", 'File "/v/torch/nn/modules/linear.py"'),
        error("MemoryError"),
    ],
)
def test_an_own_exception_is_no_follower(seen: RankError) -> None:
    assert not is_follower(1, seen, "")


DIRECTLY = "The above exception was the direct cause of the following exception:"


def test_what_an_exception_was_raised_from_counts() -> None:
    def wrapped(reason: str, frame: str, link: str = DIRECTLY) -> RankError:
        """As a pipeline stage raises it."""
        first = f"Traceback (most recent call last):\n  {frame}\n    wait()\n{reason}\n"
        second = (
            f"Traceback (most recent call last):\n  {IN_TORCH}\n    raise\nRuntimeError: \n  failed to run forward\n"
        )
        return error("RuntimeError", "\n  failed to run forward", f"{first}\n{link}\n\n{second}")

    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:36547. Check the logs!"
    assert is_follower(1, wrapped(lost, IN_TORCH), "")
    assert is_follower(1, wrapped("torch.distributed.DistBackendError: NCCL error", IN_TORCH), "")
    assert is_follower(1, wrapped("RuntimeError: \n   rank 3:\n\n  Connection reset by peer\n", IN_TORCH), "")
    assert not is_follower(1, wrapped("ValueError: boom", IN_TORCH), "")
    meanwhile = "During handling of the above exception, another exception occurred:"
    assert not is_follower(1, wrapped(lost, IN_TORCH, meanwhile), "")
    assert not is_follower(1, wrapped(lost, 'File "/v/requests/adapters.py", line 682, in send'), "")


def test_a_signal_is_no_follower_unless_cplusplus_says_so() -> None:
    assert not is_follower(-9, None, "")
    assert not is_follower(-11, None, "Connection reset by peer")
    assert is_follower(-6, None, "terminate called after throwing ... Connection closed by peer")


def test_exit_0_is_nothing() -> None:
    assert not is_follower(0, None, "Connection closed by peer")


def test_causes_in_few_words() -> None:
    assert cause(-9, None) == "killed (SIGKILL)"
    assert cause(-11, None) == "crashed (SIGSEGV)"
    assert cause(3, None) == "exit code 3"
    assert cause(1, error("torch.OutOfMemoryError")) == "exception OutOfMemoryError"
    assert cause(None, None) == "node lost"


def test_categories() -> None:
    assert category(1, error("torch.OutOfMemoryError")) == "oom_gpu"
    assert category(1, error("MemoryError")) == "oom_host"
    assert category(1, error("ValueError")) == "user_code"
    assert category(-9, None) == "unknown"
    assert category(None, None) == "host_os"
