"""MLflow by its own client, against a server that refuses, hangs and dies: its reader finds each point once."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.trackers.test_follower import Run
from unisono.spec.sink import SINKS
from unisono.train.sinks.metrics import MetricsSink
from unisono_contrib.trackers import Tracker, follower
from unisono_contrib.verify.conformance.sink import facts, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Store(ThreadingHTTPServer):
    """As much of MLflow's REST interface 2.0 as a client of one run needs. mood: well, 500, or hangs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mood, self.free = "well", threading.Event()
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The JSON of an answer; None: there is no such thing."""
        match verb:
            case "experiments/get-by-name":
                known = self.experiments.get(body["experiment_name"])
                return known and {"experiment": {"experiment_id": known, "name": body["experiment_name"]}}  # type: ignore[return-value]
            case "experiments/create":
                self.experiments[body["name"]] = "1"
                return {"experiment_id": "1"}
            case "runs/search":
                key = body["filter"].split("'")[1]
                return {
                    "runs": [
                        run
                        for run in self.runs.values()
                        if {"key": "unisono.key", "value": key} in run["data"]["tags"]
                    ]
                }
            case "runs/create":
                run_id = f"run{len(self.runs)}"
                info = {"run_id": run_id, "experiment_id": "1", "status": "RUNNING", "start_time": body["start_time"],
                        "lifecycle_stage": "active", "artifact_uri": "/nowhere"}  # fmt: skip
                self.runs[run_id] = {
                    "info": info,
                    "data": {"metrics": [], "params": [], "tags": body["tags"]},
                }
                return {"run": self.runs[run_id]}
            case "runs/get":
                return {"run": self.runs[body["run_id"]]}
            case "runs/log-batch":
                data = self.runs[body["run_id"]]["data"]
                for metric in body.get("metrics", []):
                    self.history[metric["key"]].append(metric)
                    data["metrics"] = [m for m in data["metrics"] if m["key"] != metric["key"]] + [metric]
                data["params"] += body.get("params", [])
                data["tags"] += body.get("tags", [])
                return {}
            case "runs/update":
                self.runs[body["run_id"]]["info"]["status"] = body["status"]
                return {"run_info": self.runs[body["run_id"]]["info"]}
            case "metrics/get-history":
                return {"metrics": self.history[body["metric_key"]]}
        raise AssertionError(verb)


class _Handler(BaseHTTPRequestHandler):
    server: Store  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

    def do_GET(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        self._answer({**query, **body})

    do_PATCH = do_POST

    def _answer(self, body: dict[str, Any]) -> None:
        server = self.server
        verb = urlsplit(self.path).path.partition("/mlflow/")[2]
        if server.mood == "hangs":
            server.free.wait(60.0)
        if server.mood == "500":
            self._send(500, {"error_code": "INTERNAL_ERROR", "message": "out of order"})
            return
        said = server.answer(verb, body) if verb else {}
        missing = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such thing"}
        self._send(404 if said is None else 200, missing if said is None else said)

    def _send(self, code: int, said: dict[str, Any]) -> None:
        data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    store = Store()
    threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield store
    store.free.set()
    store.shutdown()
    store.server_close()


@pytest.mark.parametrize("mood", ["500", "hangs"])
def test_mlflow_has_all_of_a_run_after_its_server_failed(mood: str, tmp_path: Path, store: Store) -> None:
    from mlflow import MlflowClient

    tracker = SINKS.read(f"mlflow:uri={store.url}")
    assert isinstance(tracker, Tracker)
    notes: list[str] = []
    run_dir = tmp_path / "demo" / "run"
    run = replace(facts(run_dir), note=notes.append)
    metrics, observer = MetricsSink().open(run), tracker.open(run)
    metrics.observe(records(1, 5))
    watched = Run.__new__(Run)
    watched.notes, watched.tracker = notes, observer
    while len(store.history["loss"]) < 5:
        threading.Event().wait(0.05)
    store.mood = mood
    metrics.observe(records(6, 9))
    watched.wait("mlflow is behind")
    metrics.close()
    observer.close()
    assert len(notes) == 1
    store.mood = "well"
    store.free.set()
    for _ in range(2):
        process = follower.start(tracker, run_dir, grace=60.0)
        process.finish()
        assert process.wait(70.0)
        process.kill()
        assert process.end == {"sent": 9, "steps": 9, "error": ""}
    client = MlflowClient(tracking_uri=store.url)
    assert [m.step for m in client.get_metric_history("run0", "loss")] == [*range(1, 10)]
    assert client.get_run("run0").info.status == "FINISHED"
