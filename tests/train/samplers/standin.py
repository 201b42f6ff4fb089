"""A stand-in for vLLM's server: the routes of its API for weight transfer, and the order, bodies and refusals that its
documentation and its source of version 0.32 have. It holds tensors alone, and writes down what it is asked."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=30)


class StandIn(ThreadingHTTPServer):
    """bug: "" or what is wrong: "noop" (broadcasts are received and nothing is loaded, as with a communicator that has
    disabled itself), "one" (a tensor is left out), "transposed", "version" (the word is kept, not the weights)."""

    daemon_threads = True

    def __init__(self, bug: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bug, self.asked = bug, list[tuple[str, Any]]()
        self.model: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.packed = set[str]()  # names whose tensors are empty beside what kernels read
        self.group: Any = None
        self.updating = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        self.asked.append((route, body))
        match route:
            case "get_world_size":
                return 200, {"world_size": 1}
            case "weight_info":
                return 200, {"weight_version": self.version}
            case "weight_checker" if body == {"action": "checksum"}:
                kept = {name: x[:0] if name in self.packed else x for name, x in self.model.items()}
                sums = {f"tp0:{n}": hashlib.sha256(x.numpy().tobytes()).hexdigest() for n, x in kept.items()}
                return 200, {"checksums": sums}
            case "init_weight_transfer_engine" if "init_info" in body:
                self._meet(**body["init_info"])
            case "start_weight_update":
                self.updating = True
            case "update_weights" if "update_info" in body:
                if self.group is None or not self.updating:
                    return 500, {"detail": "start_weight_update must be called before"}
                self._receive(**body["update_info"])
            case "finish_weight_update":
                if not self.updating:
                    return 500, {"detail": "no update is active"}
                self.updating, self.version = False, body.get("weight_version")
            case _:
                return 422, {"detail": f"{route} {body}"}
        return 200, {"message": "done"}

    def _meet(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, packed: bool
    ) -> None:
        store = TCPStore(master_address, master_port, world_size, False, TIMEOUT)
        self.group = ProcessGroupGloo(store, rank_offset, world_size, TIMEOUT)

    def _receive(self, *, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            x = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(x, 0).wait()
            first = name not in self.model
            if (self.bug == "noop" and not first) or (self.bug == "one" and name == names[0] and not first):
                continue
            self.model[name] = x


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def _do(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        code, answer = self.server.answer(self.path.lstrip("/"), body)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _do

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def standing(bug: str = "") -> Iterator[StandIn]:
    with StandIn(bug) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
