"""Who has no token, or comes under another name, is told nothing; what is told follows the run folder."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'unisono[dash]'")

from tests.report.runs import write_run
from unisono.observe.metrics import JsonLines
from unisono_contrib.report.dash.app import DashAccess, app
from unisono_contrib.report.dash.live import LiveRuns
from unisono_contrib.report.dash.logs import LogFilter, level_of, matching

TOKEN = "letters"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRuns]:
    folder = write_run(tmp_path / "runs" / "a" / "1", steps=30, straggler=1)
    with JsonLines(folder / "log.jsonl") as log:
        log.write({"at": 1.0, "rank": 0, "kind": "note", "text": "backend gloo"})
        log.write({"at": 2.0, "rank": 1, "kind": "output", "text": "UserWarning: old"})
        log.write({"at": 3.0, "rank": 1, "kind": "output", "text": "ValueError: <script>alert(1)</script>"})
    live = LiveRuns([folder])
    live.start()
    yield live
    live.stop()


def ask(live: LiveRuns, path: str, *, token: str = TOKEN, host: str = "127.0.0.1:1", body: bytes | None = None,
        kind: str = "application/json") -> tuple[int, dict[str, str], bytes]:  # fmt: skip
    """(status, headers, body) of one request to the application, without a socket."""
    place, _, query = path.partition("?")
    headers = [(b"host", host.encode()), (b"content-type", kind.encode())]
    headers += [(b"cookie", f"unisono-dash-1={token}".encode())] if token else []
    scope: dict[str, Any] = {
        "type": "http", "method": "GET" if body is None else "POST", "path": place, "query_string": query.encode(),
        "headers": headers, "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
        "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    def price(run: int, wanted: Any) -> dict[str, Any]:
        return {"headline": f"{int(wanted['ranks'])} ranks"}

    served = app(live, DashAccess(TOKEN, ["127.0.0.1", "localhost"], 1), price)
    asyncio.run(asyncio.wait_for(served(scope, receive, send), 30))
    start = next(message for message in sent if message["type"] == "http.response.start")
    text = b"".join(message.get("body", b"") for message in sent)
    return start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, text


@pytest.mark.parametrize("path", ["/", "/events", "/tile", "/chain", "/logs", "/static/dash.js"])
def test_nobody_without_the_token_is_answered(live: LiveRuns, path: str) -> None:
    for token in ("", "other", TOKEN + "x", "ÿ"):
        assert ask(live, path, token=token)[0] == 403
    assert ask(live, path, host="evil.example")[0] == 400  # a name that somebody has made lead here


def test_the_address_with_the_token_becomes_a_cookie(live: LiveRuns) -> None:
    status, headers, _ = ask(live, f"/?token={TOKEN}", token="")
    assert status == 303 and headers["location"] == "/"
    assert "httponly" in headers["set-cookie"].lower() and "samesite=strict" in headers["set-cookie"].lower()


def test_the_page_may_ask_this_server_alone(live: LiveRuns) -> None:
    status, headers, text = ask(live, "/")
    assert status == 200 and headers["content-security-policy"].startswith("default-src 'self';")
    page = text.decode()
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    panels = json.loads(page.split('id="panels-data">')[1].split("</script>")[0])
    assert {"head", "tiles", "loss", "speed", "heat", "times", "members", "faults", "logs"} <= {
        p["id"] for p in panels
    }


def test_what_changes_is_told_and_only_that(live: LiveRuns) -> None:
    number, text = live.changes()
    assert len(json.loads(text)) > 8 and live.changes(number) == (number, "[]")
    live._put(0, [{"id": "tiles", "kind": "tiles"}])
    assert json.loads(live.changes(number)[1]) == [{"run": 0, "id": "tiles", "kind": "tiles"}]


def test_an_event_carries_the_number_that_a_reader_comes_back_with(live: LiveRuns) -> None:
    from unisono_contrib.report.dash.app import _Pages

    async def first(since: int) -> str:
        stream = _Pages(live, DashAccess("", []), None)._stream(since)
        assert await anext(stream) == "retry: 1000\n\n"
        return await anext(stream)

    text = asyncio.run(asyncio.wait_for(first(0), 20))
    assert text.startswith(f"id: {live.boot}-") and "\nevent: panels\ndata: [" in text


def test_a_tile_and_a_chain(live: LiveRuns) -> None:
    status, _, tile = ask(live, "/tile?run=0&top=0&bottom=9&first=0&last=99&width=50&height=20&sort=cost")
    assert status == 200 and tile[:4] == b"late"
    status, _, text = ask(live, "/chain?rank=1&step=20")
    assert status == 200 and json.loads(text)["step"] == 20


@pytest.mark.parametrize(
    "query", ["", "run=-1&first=x", "run=99&top=99999999999999999999", "width=0&height=0", "rank=9&step=9"]
)
def test_odd_questions_have_answers(live: LiveRuns, query: str) -> None:
    for path in ("/tile", "/chain", "/logs"):
        assert ask(live, f"{path}?{query}")[0] == 200


def test_prices_are_for_objects_of_json(live: LiveRuns) -> None:
    assert json.loads(ask(live, "/price", body=b'{"run":0,"ranks":8}')[2]) == {"headline": "8 ranks"}
    assert (
        ask(live, "/price", body=b'{"run":0}', kind="text/plain")[0] == 400
    )  # what a form elsewhere could send
    for body in (b"[]", b"{", b'{"ranks":"x"}', b"{}", b" " * 20_000):
        assert ask(live, "/price", body=body)[0] == 400


def test_logs_are_filtered_and_have_a_level(live: LiveRuns) -> None:
    logs = live.runs[0].logs
    assert [level_of(line) for line in logs] == ["note", "warning", "error"]
    assert matching(logs, LogFilter.of("1", "", ""))["count"] == 2
    assert matching(logs, LogFilter.of("", "error", ""))["count"] == 1
    assert matching(logs, LogFilter.of("", "", "GLOO"))["lines"][0]["text"] == "backend gloo"
    assert matching(logs, LogFilter.of("x", "none", ""))["count"] == 3


def test_a_run_that_grows_is_followed(live: LiveRuns) -> None:
    run = live.runs[0]
    before = run.record().steps[-1]["step"]
    with JsonLines(run.folder / "metrics.jsonl") as metrics:
        metrics.write({"step": before + 1, "loss": 1.0})
    run.turn(at_once=True)
    assert run.record().steps[-1]["step"] == before + 1


def test_text_of_a_run_ends_no_script(live: LiveRuns) -> None:
    live._put(0, [{"id": "x", "kind": "text", "said": ["</script><script>alert(1)</script><!--"]}])
    page = ask(live, "/")[2].decode()
    assert "</script><script>alert" not in page and "\\u003c/script>" in page
