"""A tracker on paper, for tests: a file of lines, or a server that answers, refuses, hangs or dies."""

import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unisono_contrib.trackers import Point, TrackedRun, Tracker, TrackerConnection


class PaperTracker(Tracker):
    """Keeps points at a server of this file."""

    name = "paper"
    main = "url"
    needs = ()
    extra = "paper"
    url: str

    def connect(self, run: TrackedRun) -> TrackerConnection:
        return _Paper(self.url, run.key)


class _Paper(TrackerConnection):
    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._ask("open")

    def _ask(self, verb: str, body: Any = None) -> Any:
        data = json.dumps({"verb": verb, "key": self._key, "body": body}).encode()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(urllib.request.Request(self._url, data), timeout=1.0) as answer:
            return json.loads(answer.read())

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        held: dict[int, dict[str, float]] = {}
        for step, name, value in self._ask("read"):
            if step > after:
                held.setdefault(step, {})[name] = value
        return held

    def send(self, points: Sequence[Point]) -> None:
        self._ask("add", [[p.step, name, value] for p in points for name, value in p.values.items()])

    def describe(self, run: TrackedRun) -> None:
        self._ask("describe", [run.state, run.saved, dict(run.recipe), dict(run.tags)])

    def forget(self) -> None:
        self._ask("forget")


class PaperServer(ThreadingHTTPServer):
    """runs: the points of each run by key, as they came. mood: well, refuses (500), hangs, or deaf: it does what it is
    asked, and never says so."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Desk)
        self.runs: dict[str, list[tuple[int, str, float]]] = {}
        self.described: dict[str, Any] = {}
        self.mood = "well"
        self.asked = threading.Semaphore(0)
        self.free = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Desk(BaseHTTPRequestHandler):
    server: PaperServer  # type: ignore[assignment]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, mood = self.server, self.server.mood
        server.asked.release()
        if mood == "hangs":
            server.free.wait(20.0)
            return
        if mood == "refuses":
            self.send_error(500)
            return
        answer: Any = None
        points = server.runs.setdefault(asked["key"], [])
        match asked["verb"]:
            case "read":
                answer = points
            case "add":
                points.extend(map(tuple, asked["body"]))
            case "describe":
                server.described[asked["key"]] = asked["body"]
            case "forget":
                del server.runs[asked["key"]]
        if mood == "deaf":
            server.free.wait(20.0)
            return
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def served() -> Iterator[PaperServer]:
    """A server at work."""
    server = PaperServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.free.set()
        server.shutdown()
        server.server_close()
        thread.join(5.0)
