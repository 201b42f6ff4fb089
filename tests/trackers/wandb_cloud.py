"""As much of W&B's server as `wandb sync` needs, which is W&B's own reader of offline runs: it keeps their history."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def history_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of history of one run that lies in several offline runs, as `wandb sync` sends them one after another."""
    cloud = _Cloud()
    threading.Thread(target=cloud.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{cloud.server_address[1]}"
    environ = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "no_proxy": "127.0.0.1"}
    try:
        for folder in folders:
            command = [sys.executable, "-m", "wandb", "sync", str(folder)]
            subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
    finally:
        cloud.shutdown()
        cloud.server_close()
    return [json.loads(line) for _, line in sorted(cloud.history.items())]


class _Cloud(ThreadingHTTPServer):
    """history: lines of the only run, by their number."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CloudDesk)
        self.history: dict[int, str] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Of GraphQL."""
        names = asked.get("variables", {})
        lines = len(self.history)
        bucket = {
            "id": "1", "name": names.get("name"), "displayName": names.get("name"), "historyLineCount": lines,
            "eventsLineCount": 0, "logLineCount": 0, "historyTail": json.dumps([self.history.get(lines - 1, "{}")]),
            "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}',
            "project": {"id": "1", "name": names.get("project"), "entity": {"id": "1", "name": "me"}},
        }  # fmt: skip
        files = {"runID": "1", "uploadHeaders": [], "files": []}
        there = {
            "id": "1",
            "name": "",
            "entity": {"id": "1", "name": "me"},
            "bucket": bucket if lines else None,
        }
        return {
            "model": there,
            "upsertBucket": {"bucket": bucket, "inserted": not lines},
            "createRunFiles": files,
        }


class _CloudDesk(BaseHTTPRequestHandler):
    server: _Cloud  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        said: dict[str, Any] = {}
        if self.path == "/graphql":
            said = {"data": self.server.answer(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"content": []})
            self.server.history |= dict(enumerate(sent["content"], sent.get("offset", 0)))
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return None
