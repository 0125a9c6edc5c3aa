"""Dumps in all their forms become threads with frames, innermost first."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import stacks
from evertrain.model.stacks import Dump, Frame

PY_SPY = """\
Process 3120: /opt/venv/bin/python -u train.py --local-rank=3
Python v3.12.4 (/usr/bin/python3.12)

Thread 3120 (active+gil): "MainThread"
    Queue.get (queue.py:171)
    main (train.py:40)
Thread 3177 (idle): "Thread-1 (run)"
    Condition.wait (threading.py:302)
Thread 3190 (active)
"""

LOCALS = """\
Process 5: python
Python v3.8.12 (/opt/conda/bin/python3.8)

Thread 5 (idle): "MainThread"
    wait (threading.py:306)
        Arguments:
            self: <Condition at 0x7f (x.py:3)>
            timeout: None
        Locals:
            waiter: <_thread.lock>
    get (queue.py:179)
"""

NATIVE = """\
Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (active): "MainThread"
    0x7fbb156a3f16 (libc.so.6)
    ncclAllReduce (libnccl.so.2)
    all_reduce (torch/distributed/distributed_c10d.py:2501)
"""

FAULTHANDLER = """\
Timeout (0:05:00)!
Thread 0x00007f01 [pt_autograd_0] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 327 in wait

Current thread 0x00007f02 (most recent call first):
  File "train.py", line 12 in step
  File "train.py", line 40 in <module>

Extension modules: numpy.core, torch._C (total: 2)
"""

GDB = """\
[New LWP 23539]
Thread 2 (Thread 0x7f (LWP 23539) "pt_main_thread"):
#0  0x00007f1 in poll () from /lib64/libc.so.6
#3  c10d::ProcessGroupNCCL::WorkNCCL::wait(std::chrono::duration<long>) (this=0x5) at ../csrc/ProcessGroupNCCL.cpp:700

Thread 1 (Thread 0x7e (LWP 23537) "python"):
#0  __futex_wait (private=<optimized out>, op=(int) 393) at ./nptl/futex-internal.c:57
#1  0x0000000000543210 in take_gil (tstate=0x1)
Traceback (most recent call first):
  File "train.py", line 5, in main
"""


def only(text: str) -> Dump:
    (dump,) = stacks.read(text)
    return dump


def test_py_spy_text() -> None:
    dump = only(PY_SPY)
    assert (dump.pid, dump.command) == (3120, "/opt/venv/bin/python -u train.py --local-rank=3")
    main, named, nameless = dump.threads
    assert dump.main is main and main.holds_gil and main.state == "active"
    assert main.frames == (Frame("Queue.get", "queue.py", 171), Frame("main", "train.py", 40))
    assert (named.name, named.state) == ("Thread-1 (run)", "idle")
    assert nameless.frames == ()


def test_locals_are_no_frames() -> None:
    assert [str(one) for one in only(LOCALS).threads[0].frames] == ["wait (threading.py:306)", "get (queue.py:179)"]


def test_native_frames_have_a_library() -> None:
    frames = only(NATIVE).threads[0].frames
    assert frames[1] == Frame("ncclAllReduce", "libnccl.so.2") and frames[2].line == 2501


def test_several_processes_with_a_nodes_name_before_every_line() -> None:
    text = "\n".join(f"node-07: {line}" for line in (PY_SPY + LOCALS).splitlines())
    assert [(dump.pid, len(dump.threads), dump.threads[0].frames[-1].function) for dump in stacks.read(text)] == [
        (3120, 3, "main"),
        (5, 1, "get"),
    ]


def test_py_spy_json_finds_the_main_thread_wherever_it_stands() -> None:
    frame = {"name": "wait", "filename": "/usr/lib/python3.11/threading.py", "module": None,
             "short_filename": "threading.py", "line": 327, "locals": None, "is_entry": False}  # fmt: skip
    helper = {
        "pid": 9,
        "thread_id": 1,
        "thread_name": "pin",
        "os_thread_id": 10,
        "active": False,
        "owns_gil": False,
        "frames": [],
    }
    main = {
        **helper,
        "thread_name": "MainThread",
        "os_thread_id": 9,
        "active": True,
        "owns_gil": True,
        "frames": [frame],
    }
    dump = only(json.dumps([helper, main], indent=2))
    assert dump.pid == 9 and dump.main == dump.threads[1]
    assert dump.threads[1].state == "active" and dump.threads[1].holds_gil
    assert dump.threads[1].frames == (Frame("wait", "threading.py", 327),)


def test_faulthandler_lists_the_main_thread_last() -> None:
    dump = only(FAULTHANDLER)
    assert [one.name for one in dump.threads] == ["pt_autograd_0", ""]
    assert dump.main is not None and dump.main.frames[0] == Frame("step", "train.py", 12)


def test_gdb_knows_threads_libraries_and_python() -> None:
    dump = only(GDB)
    other, main = dump.threads
    assert dump.main is main
    assert other.frames[0] == Frame("poll", "/lib64/libc.so.6")
    assert other.frames[1].function == "c10d::ProcessGroupNCCL::WorkNCCL::wait" and other.frames[1].line == 700
    assert [one.function for one in main.frames] == ["__futex_wait", "take_gil", "main"]


def test_a_traceback_is_turned_round() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in outer\n    f()\n  File "b.py", line 2, in f'
    assert [one.function for one in only(text).threads[0].frames] == ["f", "outer"]


def test_the_stack_in_a_timeout_message() -> None:
    text = (
        "Stack trace of the failed collective: \n#0 all_reduce from /x/distributed_c10d.py:2501\n"
        "#1 wrapper from /x/c10d_logger.py:83\n"
    )
    assert [str(one) for one in only(text).threads[0].frames] == [
        "all_reduce (/x/distributed_c10d.py:2501)",
        "wrapper (/x/c10d_logger.py:83)",
    ]


def test_a_kernel_stack() -> None:
    text = "Process 8: python\n[<0>] rpc_wait_bit_killable+0x1e/0xa0 [sunrpc]\n[<0>] nfs4_do_close+0x2b/0x2f0\n"
    assert [one.function for one in only(text).threads[0].frames] == ["rpc_wait_bit_killable", "nfs4_do_close"]


@pytest.mark.parametrize(
    "text",
    [
        "Process 8: ...\nError: Failed to suspend process\nReason: EPERM: Operation not permitted\n",
        "Error: Failed to get process executable name.\nCaused by:\n    0: Permission denied (os error 13)\n",
        "Error: Failed to copy Py_Version symbol\nReason: EPERM: Operation not permitted\n",
        "ptrace: Operation not permitted.\n",
    ],
)
def test_a_dump_that_failed_is_kept_with_its_reason(text: str) -> None:
    dump = only(text)
    assert dump.threads == () and dump.main is None
    assert "ermi" in dump.failure or "EPERM" in dump.failure


def test_ordinary_text_is_no_dump() -> None:
    assert stacks.read("step 1 loss 2.0\n#1 in the list (of 3)\nall is well (really)\n    saved (model.pt:3)\n") == ()


@given(st.text(max_size=400))
def test_any_text_is_read(text: str) -> None:
    for dump in stacks.read(text):
        assert dump.threads or dump.failure


@given(st.lists(st.sampled_from((PY_SPY + LOCALS + NATIVE + FAULTHANDLER + GDB).splitlines()), max_size=60))
def test_dumps_in_any_disorder_are_read(lines: list[str]) -> None:
    for dump in stacks.read("\n".join(lines)):
        assert dump.threads or dump.failure
