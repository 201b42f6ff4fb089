"""`unisono dash`: it refuses what would show a run to others, prints where it listens, and ends when asked."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="pip install 'unisono[dash]'")

from tests.report.runs import write_run
from unisono import cli
from unisono_contrib.verbs import _whatif as whatif


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_run(tmp_path / "runs" / "a" / "1", steps=20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def dash(place: Path, *words: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(the printed address, the process)."""
    command = [sys.executable, "-m", "unisono", "dash", "runs/a", *words]
    with subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def page(address: str) -> str:
    """What a browser gets that keeps cookies."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    return opener.open(address, timeout=20).read().decode()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--no-token", "--host", "0.0.0.0"], "U-C04"),
        (["runs/a"], "U-C04"),
        (["--port", "x"], "U-C04"),
        (["--port", "70000"], "U-C04"),
        (["runs/none"], "U-C03"),
    ],
)
def test_what_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    assert cli.main(["dash", "runs/a", *words]) == 2
    assert f"error {code}" in capsys.readouterr().err


def test_a_dry_run_listens_nowhere(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dash", "runs/a", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would show runs/a/1 on 127.0.0.1\n"


def test_a_port_that_is_taken_is_an_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["dash", "runs/a", "--port", str(other.getsockname()[1])]) == 2
    assert "error U-E02  cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_asked_to_end(place: Path, number: int) -> None:
    with dash(place) as (address, process):
        assert address.startswith("http://127.0.0.1:") and "stdlib-gpt" in page(address)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            page(address.partition("?")[0])
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr is not None and process.stderr.read() == "Ctrl-C ends the page, not the run\n"


@pytest.mark.timeout(90)
def test_an_open_page_finds_a_server_that_was_killed_and_started_anew(place: Path) -> None:
    with dash(place) as (first, process):
        process.kill()
        process.wait(20)
    with dash(place) as (second, _):
        assert second == first and "stdlib-gpt" in page(second)
    kept = [*(place / "cache" / "unisono" / "dash").iterdir()]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]


def resolved(folder: Path, plan: str = "dp=2", batch: int = 32) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.resolved.toml").write_text(
        f'name = "x"\nplan = "{plan}"\n[model]\nkind = "gpt"\nn_layer = 4\nn_head = 4\nd_model = 96\ncontext = 128\n'
        f'[data]\nsource = "stdlib"\ntokenizer = "byte"\n[train]\nsteps = 9\nglobal_batch = {batch}\nmicro_batch = 4\n'
    )
    return folder


def test_the_run_as_it_is_takes_what_was_measured(tmp_path: Path) -> None:
    run = resolved(tmp_path / "a")
    choices = whatif.choices(run, {"HOME": str(tmp_path)})
    assert choices is not None and choices["now"] == {"ranks": 2, "link": 1.0, "batch": 32}
    said = whatif.answer(run, whatif.WhatIf(2, 1.0, 32), 0.5, {"HOME": str(tmp_path)})
    assert said["step_s"] == pytest.approx(0.5) and said["times"] == pytest.approx(1.0)
    assert said["headline"] == "500 ms a step, as many samples a second as now"
    json.dumps(said, allow_nan=False)


def test_more_ranks_a_quicker_link_and_a_larger_batch_are_never_slower_by_the_sample(tmp_path: Path) -> None:
    run, environ = resolved(tmp_path / "a", "dp=4", 64), {"HOME": str(tmp_path)}

    def times(ranks: int, link: float, batch: int) -> float:
        return whatif.answer(run, whatif.WhatIf(ranks, link, batch), 0.5, environ)["times"]

    assert times(4, 0.01, 64) < times(4, 1.0, 64) < times(4, 100.0, 64)
    assert times(4, 1.0, 256) > times(4, 1.0, 64)


@pytest.mark.parametrize(("ranks", "batch"), [(3, 64), (4, 3)])
def test_what_cannot_be_is_an_error_with_a_remedy(tmp_path: Path, ranks: int, batch: int) -> None:
    from unisono.spec.errors import UnisonoError

    run = resolved(tmp_path / "a", "dp=2 tp=2", 64)
    with pytest.raises(UnisonoError) as caught:
        whatif.answer(run, whatif.WhatIf(ranks, 1.0, batch), None, {"HOME": str(tmp_path)})
    assert caught.value.fix


def test_a_run_without_a_price_has_no_sliders(tmp_path: Path) -> None:
    assert whatif.choices(tmp_path / "none", {"HOME": str(tmp_path)}) is None
