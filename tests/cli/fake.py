"""Stands in for keeper, agent and controller, so that `evertrain run` can be tested alone. A script, not a test.

fake.py drive WORDS…            evertrain's command line, with this file in place of the real processes
fake.py evertrain.controller S  serves the API, does what $FAKE says, writes the result
fake.py evertrain.agent S       lives until the result is there or the owner is gone
fake.py S                       the same, as a keeper
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STATUS = {
    "job": "fake",
    "state": "running",
    "step": 7,
    "step_kind": "absolute",
    "attempt": 1,
    "ettr": 0.5,
    "ettr_hour": 0.5,
    "steps_at_risk": 0,
    "start": {"wanted": "zygote", "mode": "zygote", "reason": ""},
    "workers": [],
    "nodes": [],
    "active": ["everything"],
    "blind": ["nothing"],
    "message": "",
    "exit_code": None,
    "resume": None,
}


def drive(words: list[str]) -> int:
    from evertrain.cli import launch, main, mounts

    if os.environ.get("FAKE_NFS"):
        mounts.is_network = lambda *_: True
    launch.KEEPER = Path(__file__)
    launch.OWN_PYTHON = (sys.executable, __file__)  # type: ignore[assignment]
    return main.main(words)


def live(spec: dict[str, Any], run_dir: Path) -> int:
    """Until the job is over. FAKE_ORPHAN: with a child that outlives a keeper that is killed."""
    name = f"{'keeper' if 'local_world_size' in spec else 'agent'}-{spec['node']}"
    with (run_dir / "lives.txt").open("a") as out:
        out.write(f"{name} {os.getpid()} {bool({'EVERTRAIN_TOKEN', 'EVERTRAIN_CODE_TOKEN'} & set(os.environ))}\n")
    if os.environ.get("FAKE_ORPHAN") and name.startswith("keeper"):
        sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (run_dir / "orphan.txt").write_text(str(sleeper.pid))
    while not (run_dir / "result.json").exists():
        if spec["owner_fd"] is not None and select.select([spec["owner_fd"]], [], [], 0)[0]:
            (run_dir / f"{name}.owner-gone").touch()
            return 0
        time.sleep(0.02)
    return 0


def serve(spec: dict[str, Any]) -> int:
    """FAKE: JSON with the seconds until the end, output of rank 0, and how the job ends."""
    run_dir = Path(spec["run_dir"])
    status = {**STATUS, "nodes": [{"id": node, "state": "active"} for node in spec["nodes"]]}
    plan = {"after_s": 1.0, "stdout": "", "state": "done", "exit_code": 0, **json.loads(os.environ.get("FAKE", "{}"))}
    if plan.get("broken"):
        sys.exit("this controller is broken")
    listener = socket.socket(fileno=spec["listen_fd"])
    token = Path(spec["token_file"]).read_text()
    code = f"{spec['code_root']} {spec['code_dir']} {spec['code_token_file']}"
    (run_dir / "code.txt").write_text(f"{code}\n{Path(spec['code_token_file']).read_text()}")
    stopped = threading.Event()
    ended: dict[str, Any] = {"state": plan["state"], "exit_code": plan["exit_code"], "message": "as planned"}

    class Api(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(status if self.path == "/v1/status" else [])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with (run_dir / "posts.jsonl").open("a") as out:
                out.write(json.dumps({"path": self.path, **body}) + "\n")
            if self.path == "/v1/stop" and not plan.get("deaf"):
                ended.update(state="stopped", exit_code=128 + body["signal"], message=body["reason"])
                stopped.set()
            self._answer({})

        def _answer(self, value: Any) -> None:
            right = self.headers["Authorization"] == f"Bearer {token}"
            content = json.dumps(value).encode()
            self.send_response(200 if right else 401)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(listener.getsockname(), Api, bind_and_activate=False)
    server.socket = listener
    (run_dir / "controller.json").write_text(json.dumps({"url": spec["url"], "pid": os.getpid(), "term": 1}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = Path(spec["log_root"]) / "attempt_1" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stdout.log").write_bytes(plan["stdout"].encode("latin-1"))
    stopped.wait(plan["after_s"])
    result = {**ended, "first_failure": None, "status": status, "attempts": [], "incidents": []}
    # where the disk is full, the shared memory of the run takes the result
    folder = Path(spec["run_folder"]) if plan.get("no_room") else run_dir
    (folder / "result.new").write_text(json.dumps(result))
    (folder / "result.new").rename(folder / "result.json")
    return 0


def main(words: list[str]) -> int:
    if words[0] == "drive":
        return drive(words[1:])
    spec = json.loads(Path(words[-1]).read_bytes())
    if words[0] == "evertrain.controller":
        return serve(spec)
    # a keeper knows its log folder only, an agent its log root
    logs = Path(spec["log_dir"] if "log_dir" in spec else spec["log_root"])
    return live(spec, logs.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
