"""Is this node well? Test programs for stopped nodes. Standard library and torch only: they run where ranks run.

One process a node serves them, started with the ranks' interpreter by file (`python -I …/diagnose/__main__.py`) or
forked from a process that has imported torch (`serve.serve`). It imports torch once, runs no operation itself and forks
the ranks of each test, so a test that crashes or hangs is killed and says nothing of the others. JSON lines, one object
each. What it is given, on standard input, first:

    {"node": "node-3", "ranks": 2, "device": "auto", "threads": 1, "folder": "/scratch", "environ": {"NAME": "value"}}

`ranks` processes take part in a test, one a GPU; `device` is auto, cpu or cuda; `folder` is node-local, for scratch
files; all but `node` have defaults. It answers `{"is": "ready", "node": …, "pid": …, "torch": …}`. Then, one after the
other:

    {"id": 7, "program": "compute", "budget_s": 10, "parameters": {"size": 512}}

and, at any time, the end of its input, which ends the test that runs and the process. For each test it prints

    {"is": "reading", "id": 7, "rank": 1, "name": "matmul float32", "value": 81.2, "unit": "GFLOP/s", "ok": true,
     "detail": {…}}
    {"is": "done", "id": 7, "program": "compute", "outcome": "passed", "because": "", "seconds": 1.3}

`ok` is what the node can say by itself; null: only a comparison with others can (`locate.alignment`, `locate.pairs`).
Outcomes, the first that holds:

    refused   no such program or parameter; nothing was run
    failed    a reading is not ok: this is evidence against the node
    late      the budget was over, and the ranks were killed; `because` names those that had not finished
    crashed   a rank died or raised; `because` has the last line
    absent    there is nothing to test here (no dcgmi that works, no second rank, no scratch folder)
    passed    all readings are there, and none is not ok

    program    parameters (defaults)                        readings
    vendor     level (1), dcgmi, nvidia_smi                 each diagnostic of DCGM; settings before and after
    compute    size, dtypes, rounds (3)                     matmul DTYPE whole|fraction: GFLOP/s
    memory     size_bytes, rounds (1)                       pattern NAME: bytes/s
    transfer   size_bytes, rounds (3)                       to device, from device: bytes/s
    storage    folder (the scratch one), size_bytes         write, read: bytes/s
    exchange   size_bytes, rounds (5), store, nodes         all-to-all within the node, or all-gather among `nodes`
    alignment  kind (dense), repeats (50), sizes            alignment: hashes of one training step, by rank

`exchange` among several nodes is asked of each of them with the same `nodes` (names, in one order), `key` (not used
before) and `store` `{"host": …, "port": …}`: a TCPStore that somebody serves meanwhile. `detail.mismatches` names nodes
whose data came with other content; `segments` and `resent` are what TCP has sent, and what of it again. A node whose
partner is not there ends `late` or `crashed`: a failure of the pair.

`alignment` says in `detail` of each rank `setting` (`locate.alignment.Setting`), `runs` and `records` (`RankRuns`).

EVERTRAIN_DIAGNOSE_FAULT (fault.py) makes one node compute wrongly, in drills.
"""

PROGRAMS = ("vendor", "compute", "memory", "transfer", "storage", "exchange", "alignment")
