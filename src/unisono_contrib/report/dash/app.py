"""The server of `unisono dash`: a page, its changes as server-sent events, tiles, chains of causes, logs and prices.

Nobody without the token is answered, and none under another name than that of this host: a page elsewhere in the same
browser can neither read nor ask anything here.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.spec.errors import UnisonoError
from unisono_contrib.report.dash import shell
from unisono_contrib.report.dash.chain import chain
from unisono_contrib.report.dash.live import LiveRuns
from unisono_contrib.report.dash.logs import LogFilter, matching
from unisono_contrib.report.dash.shell import POLICY

Price = Callable[[int, Mapping[str, Any]], dict[str, Any]]
"""The planner's answer to a what-if of a run, by its number. Raises UnisonoError."""
_EVERY = 0.5  # seconds between two looks for changes
_ALIVE = 15.0  # seconds after which a connection without changes is spoken over
_MOST = 1 << 14  # bytes of a question
_PIXELS = 4096
_HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin", "x-frame-options": "DENY",
}  # fmt: skip


@dataclass(frozen=True)
class DashAccess:
    """Who is answered. token: "" where everybody of this host is. hosts: names under which this server is called."""

    token: str
    hosts: Sequence[str]
    port: int = 0

    @property
    def cookie(self) -> str:
        """Ports of a host share their cookies."""
        return f"unisono-dash-{self.port}"

    def admits(self, request: Request) -> bool:
        """Whether a request has the token, in its cookie or its address."""
        shown = request.cookies.get(self.cookie) or request.query_params.get("token") or ""
        return not self.token or secrets.compare_digest(shown.encode(), self.token.encode())


class _Guard:
    """Puts the headers onto all answers, and turns away who lacks the token."""

    def __init__(self, app: ASGIApp, access: DashAccess) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        if scope["type"] != "http" or self._access.admits(Request(scope)):
            await self._app(scope, receive, with_headers)
            return
        refusal = "The address that unisono dash printed has a token, which this one lacks.\n"
        await PlainTextResponse(refusal, status_code=403)(scope, receive, with_headers)


def app(live: LiveRuns, access: DashAccess, price: Price | None) -> Starlette:
    """The application. price: None where there is no what-if."""
    pages = _Pages(live, access, price)
    routes = [
        Route("/", pages.page), Route("/static/{name}", pages.static), Route("/events", pages.events),
        Route("/tile", pages.tile), Route("/chain", pages.chain), Route("/logs", pages.logs),
        Route("/price", pages.price, methods=["POST"]),
    ]  # fmt: skip
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[*access.hosts], www_redirect=False)
    return Starlette(routes=routes, middleware=[trusted, Middleware(_Guard, access=access)])


class _Pages:
    def __init__(self, live: LiveRuns, access: DashAccess, price: Price | None) -> None:
        self._live, self._access, self._price = live, access, price

    async def page(self, request: Request) -> Response:
        """The page; with a token in its address, the same without it, and the token as a cookie."""
        if "token" in request.query_params:
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._access.cookie, self._access.token, httponly=True, samesite="strict")
            return answer
        number, changed = self._live.changes()
        facts = {"boot": self._live.boot, "number": number, "runs": [run.name for run in self._live.runs],
                 "prices": self._price is not None}  # fmt: skip
        text = shell.served(", ".join(run.name for run in self._live.runs), facts, changed)
        return Response(text, media_type="text/html", headers={"cache-control": "no-store"})

    async def static(self, request: Request) -> Response:
        """Style and script."""
        part = shell.part(request.path_params["name"])
        if part is None:
            return PlainTextResponse("no such file\n", status_code=404)
        text, kind = part
        return Response(text, media_type=kind, headers={"cache-control": "no-cache"})

    async def events(self, request: Request) -> Response:
        """Panels that have changed, for as long as somebody listens. An event's number says what a reader has; one of
        another process says nothing here."""
        boot, _, number = (
            request.headers.get("last-event-id") or request.query_params.get("last", "")
        ).partition("-")
        since = int(number) if boot == self._live.boot and number.isdigit() else 0
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(since), media_type="text/event-stream", headers=headers)

    async def _stream(self, since: int) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        quiet = 0.0
        while True:
            if self._live.number > since:
                since, changed = self._live.changes(since)
                quiet = 0.0
                yield f"id: {self._live.boot}-{since}\nevent: panels\ndata: {changed}\n\n"
            elif quiet >= _ALIVE:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_EVERY)
            quiet += _EVERY

    async def tile(self, request: Request) -> Response:
        """A window of the heat map, see `LatenessMap.tile`; `fine` where somebody chose the window, for whom steps are
        read that were passed over."""
        ask = _Numbers(request)
        run = self._live.runs[ask("run", len(self._live.runs) - 1)]
        rows, steps = (ask("top"), ask("bottom")), (ask("first"), ask("last"))
        width, height = max(1, ask("width", _PIXELS)), max(1, ask("height", _PIXELS))

        def drawn() -> bytes:
            if ask("fine"):
                run.refine(*steps)
            with run.lock:
                return run.late.tile(rows, steps, width, height, request.query_params.get("sort") == "cost")

        content = await run_in_threadpool(drawn)
        return Response(content, media_type="application/octet-stream", headers={"cache-control": "no-store"})

    async def chain(self, request: Request) -> Response:
        """Why a rank was late in a step."""
        ask = _Numbers(request)
        run = self._live.runs[ask("run", len(self._live.runs) - 1)]
        rank, step = ask("rank"), ask("step")
        lines = await run_in_threadpool(run.lines_of, step)
        return JSONResponse(chain(rank, step, lines, run.late.places))

    async def logs(self, request: Request) -> Response:
        """The latest lines of the logs that a filter lets pass."""
        ask, words = _Numbers(request), request.query_params
        run = self._live.runs[ask("run", len(self._live.runs) - 1)]
        wanted = LogFilter.of(words.get("rank", ""), words.get("level", ""), words.get("text", ""))
        return JSONResponse(matching(run.logs, wanted))

    async def price(self, request: Request) -> Response:
        """What the planner says of other ranks, links and batches."""
        if self._price is None:
            return JSONResponse({"error": "nothing is priced here"}, status_code=404)
        body = await request.body()
        try:
            if len(body) > _MOST or not request.headers.get("content-type", "").startswith(
                "application/json"
            ):
                raise ValueError("not JSON")
            asked_for = await request.json()
            at = int(asked_for.get("run", 0))
            answer = await run_in_threadpool(self._price, at, asked_for)
        except UnisonoError as error:
            return JSONResponse({"error": error.what, "try": error.fix})
        except (ValueError, TypeError, AttributeError, LookupError):
            return JSONResponse({"error": "ranks, link and batch are numbers of a run"}, status_code=400)
        return JSONResponse(answer)


class _Numbers:
    """Whole numbers of a request's address; 0 for what is none."""

    def __init__(self, request: Request) -> None:
        self._words = request.query_params

    def __call__(self, name: str, most: int = 1 << 40) -> int:
        word = self._words.get(name, "")
        return min(int(word), most) if word.isascii() and word.isdigit() and len(word) < 16 else 0
