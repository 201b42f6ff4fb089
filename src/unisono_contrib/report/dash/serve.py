"""The process of `unisono dash`: where it listens, with which token, and how it ends."""

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from unisono.observe.files import write_whole
from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono_contrib.report.dash.app import DashAccess, Price, app
from unisono_contrib.report.dash.live import LiveRuns

_NEVER_SHOWN = "0.0.0.0"


@dataclass(frozen=True)
class ListenPlace:
    """Where to listen. port: None for that of the last time, if it is free. guarded: whether a token is asked for.
    environ: says where the cache lies, in which port and token of the last time are kept, so that an open page finds a
    server that was started anew."""

    host: str
    port: int | None
    guarded: bool
    environ: Mapping[str, str]

    def memory(self, live: LiveRuns) -> Path:
        """The file that remembers the last time that these runs were shown."""
        environ = self.environ
        base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
        which = "\n".join(str(run.folder.resolve()) for run in live.runs)
        return Path(base, "unisono", "dash", f"{hashlib.sha256(which.encode()).hexdigest()[:16]}.json")


def run(live: LiveRuns, place: ListenPlace, price: Price | None, settings: Settings) -> dict[str, Any]:
    """Serve until Ctrl-C or SIGTERM. Returns the object of --json. Raises UsageError where nobody can listen there."""
    path = place.memory(live)
    last = _remembered(path)
    listener = _listen(place, last.get("port"))
    port = listener.getsockname()[1]
    token = (last.get("token") or secrets.token_urlsafe(24)) if place.guarded else ""
    _remember(path, {"port": port, "token": token or last.get("token")})
    host = socket.gethostname() if place.host in (_NEVER_SHOWN, "::") else place.host
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    names = {"127.0.0.1", "localhost", "[::1]", shown} if _is_loopback(place.host) else {"*"}
    live.start()
    (settings.note if settings.json else settings.say)(
        address
    )  # with --json stdout is for the object at the end
    settings.note("Ctrl-C ends the page, not the run")
    config = uvicorn.Config(
        app(live, DashAccess(token, sorted(names), port), price), log_level="error", access_log=False, lifespan="off",
        timeout_graceful_shutdown=1, ws="none", server_header=False,
    )  # fmt: skip
    server = _Server(config)
    try:
        with listener, contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        live.stop()
    return {"address": address, "runs": [str(shown.folder) for shown in live.runs]}


class _Server(uvicorn.Server):
    """uvicorn, which after its end would raise the signal again that ended it: ending so is in good order here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(place: ListenPlace, last: object) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    tried = [place.port] if place.port is not None else [last if isinstance(last, int) else 0, 0]
    for at, port in enumerate(tried):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((place.host, port))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            if at == len(tried) - 1:
                raise UsageError(
                    f"cannot listen on {place.host} port {port}: {error.strerror or error}", where="--host, --port",
                    fix="--port 0, which takes any that is free", code="E02",
                ) from error  # fmt: skip
    raise AssertionError("there is always a port to try")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _remembered(path: Path) -> dict[str, Any]:
    """What was kept the last time, unless others than this user could have read or written it."""
    with contextlib.suppress(OSError, ValueError):
        seen = path.stat()
        if seen.st_uid == os.getuid() and not seen.st_mode & 0o077:
            content = json.loads(path.read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
    return {}


def _remember(path: Path, facts: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, json.dumps(facts))
        path.chmod(0o600)
