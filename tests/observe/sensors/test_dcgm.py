"""What dcgm-exporter says, and what it means when it says nothing."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.observe.sensors import dcgm
from evertrain.observe.sensors.dcgm import TENSOR, VARIABLE, DcgmSensor, samples
from support.effort import examples

METRICS = f"""# HELP {TENSOR} Ratio of cycles the tensor (HMMA) pipe is active (in %).
# TYPE {TENSOR} gauge
{TENSOR}{{gpu="0",UUID="GPU-a",pci_bus_id="00000000:10:00.0",device="nvidia0",Hostname="n"}} 0.41
{TENSOR}{{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="a \\"name\\", with {{}}"}} 0.02 1700000000000
{TENSOR}{{gpu="1",UUID="GPU-b",GPU_I_ID="7"}} 0.07
{TENSOR}{{gpu="2"}} 1
{TENSOR}{{gpu="3"}} NaN
{TENSOR}{{gpu="4"}} 9223372036854775794
{TENSOR}_OTHER{{gpu="5"}} 0.5
DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-a"}} 55
"""


class Exporter:
    """Answers with `text` and `status`, on a port of its own."""

    def __init__(self, port: int = 0) -> None:
        exporter = self
        self.text, self.status = METRICS, 200

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(exporter.status)
                self.end_headers()
                self.wfile.write(exporter.text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    started = Exporter()
    yield started
    started.close()


def test_tensor_activity_of_each_gpu(exporter: Exporter) -> None:
    looks = DcgmSensor(environ={VARIABLE: exporter.url})
    seen = looks.look(1.0)
    assert looks.tensor == {"GPU-a": 0.41, "GPU-b": 0.07, "2": 1.0}
    assert (seen.last, seen.blind, seen.absent, seen.signs) == ("tensor cores active 7% to 100%", "", "", ())


def test_an_exporter_without_profiling_answers_all_the_same(exporter: Exporter) -> None:
    exporter.text = 'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 55\n'
    seen = DcgmSensor(exporter.url).look(1.0)
    assert "without tensor activity" in seen.last and not seen.blind and not seen.absent


def test_nobody_ever_answered_then_somebody_does_and_then_is_gone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    looks = DcgmSensor(f"http://127.0.0.1:{port}/metrics")
    seen = looks.look(1.0)
    assert "no dcgm-exporter" in seen.absent and VARIABLE in seen.absent and not seen.blind
    exporter = Exporter(port)
    try:
        assert looks.look(2.0).last.startswith("tensor cores")
    finally:
        exporter.close()
    seen = looks.look(3.0)
    assert "it did before" in seen.blind and not seen.absent
    assert looks.tensor == {}


@pytest.mark.parametrize(("text", "status"), [("up 1\n", 200), ("not found", 404)])
def test_something_else_at_that_port(exporter: Exporter, text: str, status: int) -> None:
    looks = DcgmSensor(exporter.url)
    exporter.text, exporter.status = text, status
    assert looks.look(1.0).absent
    exporter.text, exporter.status = METRICS, 200
    assert looks.look(2.0).last
    exporter.text, exporter.status = text, status
    assert looks.look(3.0).blind


def test_one_that_listens_and_does_not_answer_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        seen = DcgmSensor(f"http://127.0.0.1:{deaf.getsockname()[1]}/metrics").look(1.0)
    assert "timed out" in seen.blind and not seen.absent


def test_one_that_speaks_another_language_is_blind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00\x01 nothing of HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        seen = DcgmSensor(f"http://127.0.0.1:{server.getsockname()[1]}/metrics").look(1.0)
        thread.join()
    assert seen.blind and not seen.absent


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp//x", "http://127.0.0.1:port/"])
def test_a_url_that_is_none(url: str) -> None:
    seen = DcgmSensor(url).look(1.0)
    assert seen.blind and url in seen.blind


def test_a_proxy_is_not_asked(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert DcgmSensor(exporter.url).look(1.0).last


def test_labels_and_values_as_the_format_has_them() -> None:
    text = 'm{a="x\\\\y",b="q\\"",c="l\\nm",} +Inf\nm 1e-3\nm{} 2 17\nm{a="1"} x\nm{a="1"}\nmm 3\n'
    assert list(samples(text, "m")) == [({"a": "x\\y", "b": 'q"', "c": "l\nm"}, float("inf")), ({}, 0.001), ({}, 2.0)]


@settings(max_examples=examples(50))
@given(st.text())
def test_any_text_may_come(text: str) -> None:
    found = list(samples(f"{TENSOR}{text}\n{text}", TENSOR))
    assert all(value == value and isinstance(labels, dict) for labels, value in found)
