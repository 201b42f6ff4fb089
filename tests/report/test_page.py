"""The page as a browser sees it. Rendering is skipped, loudly, where there is no Chromium."""

import json
import re
import shutil
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono.report.page import run
from unisono.spec import words

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CASES = ("two", "straggler", "one", "many", "hostile", "empty", "damaged", "crashed")


def make(folder: Path, case: str) -> Path:
    """A run folder of the given kind."""
    if case == "empty":
        (folder / "events").mkdir(parents=True)
        return folder
    shapes = {
        "straggler": {"dp": 2, "pp": 2, "straggler": 3, "steps": 130},
        "one": {"dp": 1, "steps": 1, "trace_steps": 1},
        "many": {"dp": 16, "pp": 4, "steps": 5, "trace_steps": 1},
    }
    write_run(folder, **shapes.get(case, {"dp": 2, "steps": 12}))
    if case == "hostile":
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {
            "sample": "</pre><script>alert(1)</script>\x00",
            "plan": '<b onclick="x">&',
            "parity": 7,
            "timetable": 3,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "config.resolved.toml").write_text('name = "<img src=x>"\n')
    if case == "damaged":
        (folder / "trace" / "rank1.json.gz").write_bytes(b"cut")
        (folder / "metrics.jsonl").write_text('{"step": 0, "loss": null}\n{"step":')
        (folder / "events" / "rank0.jsonl").write_text(
            '{"kind":"step","step":0,"time":{"forward":"long"},"bytes":3}\n'
        )
        (folder / "env.json").write_text('{"git": 4, "packages": [], "env": null, "argv": "x"}')
    if case == "crashed":
        error = {
            "code": "U-R01",
            "what": "rank 1 raised ValueError",
            "try": "look at its traceback",
            "rank": 1,
        }
        (folder / "error.json").write_text(json.dumps(error))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {case: Path(run(make(root / case, case))["report_html"]) for case in CASES}


class Elements(HTMLParser):
    """All start tags with their attributes, and whether they close in order."""

    void = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("case", CASES)
def test_asks_nobody_for_anything(pages: dict[str, Path], case: str) -> None:
    text = pages[case].read_text()
    parser = Elements()
    parser.feed(text)
    assert parser.open == []
    for tag, attributes in parser.found:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert attributes.get(name) in (None, "data:,")
    assert "alert(1)</script>" not in text
    assert not re.search(r"(url\(|@import|import\s*\(|fetch\(|XMLHttpRequest)", text)
    assert len(text) < 2_000_000


@pytest.mark.parametrize("case", CASES)
def test_has_one_sentence_on_top_and_words_for_every_picture(pages: dict[str, Path], case: str) -> None:
    text = pages[case].read_text()
    (headline,) = re.findall(r'<h1 data-testid="verdict">(.*?)</h1>', text)
    assert headline.endswith(".")
    parser = Elements()
    parser.feed(text)
    for tag, attributes in parser.found:
        if tag == "svg":
            assert attributes.get("aria-label")
    assert ("Missing from this run" in text) == (case in ("empty", "damaged"))


def test_says_what_a_reader_looks_for(pages: dict[str, Path]) -> None:
    text = pages["straggler"].read_text()
    for testid in (
        "verdict tiles facts loss speed times timeline pipeline heat bytes memory sample again environment config"
    ).split():
        assert f'data-testid="{testid}"' in text, testid
    assert f"unisono train {pages['straggler'].parent / 'config.resolved.toml'}" in text
    assert "max |d loss| 1.2e-6" in text
    assert "rank 1 raised ValueError" in pages["crashed"].read_text()


def test_the_picture_is_written(pages: dict[str, Path]) -> None:
    for page in pages.values():
        content = page.with_name("report.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") == 1600


def browse(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """(document after its scripts ran, console lines) of a page in a browser without a network."""
    if CHROMIUM is None:
        warnings.warn("no chromium here: the report page was NOT looked at in a browser", stacklevel=2)
        pytest.skip("no chromium: apt-get install chromium to check the page in a browser")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=2000",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["straggler", "empty", "damaged"])
def test_the_console_stays_empty(pages: dict[str, Path], tmp_path: Path, case: str) -> None:
    document, console = browse(pages[case], tmp_path)
    assert console == []
    assert 'data-testid="verdict"' in document


@pytest.mark.timeout(120)
def test_the_console_would_have_said_so(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>throw new Error('look here')</script>")
    assert any("look here" in line for line in browse(page, tmp_path / "profile")[1])


_PROBE = """<title>unread</title><iframe src="{page}" style="width:{width}px;height:900px;border:0"></iframe><script>
addEventListener('load',()=>{{
  const inner=document.querySelector('iframe').contentDocument,root=inner.documentElement;
  const hover=node=>node.dispatchEvent(new inner.defaultView.PointerEvent('pointermove',
    {{bubbles:true,clientX:node.getBoundingClientRect().left+3,clientY:5}}));
  const plot=inner.querySelector('.plot');
  hover(inner.querySelector('[data-testid=timeline] .bars g rect'));
  const tip=inner.getElementById('tip').textContent;
  hover(plot);
  document.title=[root.scrollWidth-root.clientWidth,tip,plot.parentNode.querySelector('output').textContent].join('|');
}});
</script>"""


_CUT = """<title>unread</title><iframe src="{page}" style="width:375px;height:900px;border:0"></iframe><script>
addEventListener('load',()=>{{
  const box=document.querySelector('iframe').contentDocument.querySelector('.parts .scroll');
  document.title=box.scrollWidth-box.clientWidth;
}});
</script>"""


@pytest.mark.timeout(120)
def test_the_table_of_prices_fits_a_phone(tmp_path: Path) -> None:
    parts = {
        "compute": 0.07,
        "comm shard": 0.0101,
        "comm dp": 287e-6,
        "wait": 0.01,
        "optim": 0.004,
        "other": 6e-3,
    }
    told = {
        "schema_version": 1,
        "cluster": "here",
        "calibrated": True,
        "error_pct": 15.0,
        "parts": parts,
        "mem_mib": 312,
    }
    write_run(tmp_path, dp=2, steps=12)
    (tmp_path / "prediction.json").write_text(json.dumps(told))
    made = Path(run(tmp_path)["report_html"])
    probe = tmp_path / "probe.html"
    probe.write_text(_CUT.format(page=made.as_uri()))
    document, console = browse(probe, tmp_path / "profile", "--window-size=1700,1000")
    assert console == [] and re.findall(r"<title>(.*?)</title>", document) == ["0"]


def test_a_resumed_run_is_run_again_from_its_recipe_and_any_run_goes_on_for_more(tmp_path: Path) -> None:
    """Its own command, `--resume RUN`, would find nothing left to do."""
    write_run(tmp_path, dp=2, steps=12)
    summary = json.loads((tmp_path / "summary.json").read_text())
    for command_line, again in (
        ("unisono train --resume runs/a --train.steps 12", f"unisono train {tmp_path}/config.resolved.toml"),
        ("unisono train mine.toml", "unisono train mine.toml"),
    ):
        (tmp_path / "summary.json").write_text(json.dumps({**summary, "command": command_line}))
        text = Path(run(tmp_path)["report_html"]).read_text()
        assert f'<pre class="command">{again}</pre>' in text
        assert re.search(
            rf"<pre>unisono train --resume {re.escape(str(tmp_path))} --train.steps 2\d</pre>", text
        )


def test_bytes_are_named_by_what_they_carry() -> None:
    assert words.traffic("dp", "all_reduce") == "gradients, all-reduce (dp)"
    assert words.traffic("replica", "all_reduce") == "gradient norm, all-reduce"
    assert words.traffic("dp", "all_gather") == "all-gather (dp)"
    assert words.traffic("", "all_reduce") == "all-reduce"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [320, 1600])
def test_fits_its_window_and_answers_the_pointer(pages: dict[str, Path], tmp_path: Path, width: int) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(_PROBE.format(page=pages["straggler"].as_uri(), width=width))
    document, console = browse(probe, tmp_path / "profile", "--window-size=1700,1000")
    assert console == []
    (title,) = re.findall(r"<title>(.*?)</title>", document)
    beyond, tip, readout = title.split("|")
    assert int(beyond) <= 0  # nothing hangs over the edge
    assert tip.startswith("rank 0, input")
    assert re.match(r"step \d+: training", readout)
