"""Shells that close streams, terminals that go, limits of the system: the run goes on, or one error says what is short."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.bad_inputs import RECIPE, put
from tests.verbs.jobs import started

pytestmark = pytest.mark.timeout(150)

UNISONO = f"{sys.executable} -m unisono"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    put(tmp_path, {"r.toml": RECIPE, "words.txt": jobs.words(600)})
    return tmp_path


def shell(line: str, place: Path) -> tuple[int, str]:
    """(exit code, what was said) of a line of bash, where $U is `unisono`."""
    done = subprocess.run(
        ["bash", "-c", f"{line} ; exit ${{PIPESTATUS[0]}}"],
        cwd=place,
        env={**os.environ, "U": UNISONO},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def trained(place: Path) -> bool:
    """Whether a run has made its four steps and saved them."""
    return [jobs.checkpoints(run) for run in jobs.runs_of(place)] == [["step-000004"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$U train r.toml >&-", 0),
        ("$U train r.toml --json 2>&-", 0),
        ("$U train r.toml >&- 2>&- <&-", 0),
        ("$U train r.toml 2>&1 >/dev/null | head -1", 0),
        ("$U train r.toml --json 2>/dev/null | true", 141),
        ("$U train r.toml --json >/dev/full", 2),
        ("TMPDIR=/nonexistent $U train r.toml", 0),
        ("env -u HOME LC_ALL=C PYTHONIOENCODING=ascii $U train r.toml", 0),
        ("TERM=dumb COLUMNS=12 $U train r.toml", 0),
        ("nohup $U train r.toml", 0),
    ],
)
def test_whatever_becomes_of_the_streams_the_run_is_made(line: str, code: int, place: Path) -> None:
    assert shell(line, place)[0] == code
    assert trained(place)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("$U config show r.toml > /dev/full", 2, "U-E02  cannot write the answer: No space left on device"),
        ("$U config show r.toml >&-", 0, ""),
        ("$U trian 2>&-", 2, ""),
        pytest.param("(ulimit -n 10; $U train r.toml)", 2, "too many open files", marks=pytest.mark.slow),
        pytest.param("(ulimit -n 24; $U train r.toml)", 2, "too many open files", marks=pytest.mark.slow),
        pytest.param("(ulimit -f 8; $U train r.toml)", 2, "File too large", marks=pytest.mark.slow),
    ],
)
def test_what_is_short_is_said_in_one_block(line: str, code: int, says: str, place: Path) -> None:
    found, said = shell(line, place)
    assert found == code and says in said, said
    assert "Traceback" not in said and said.count("error U-") == bool(says)
    assert not list(place.glob("runs/*/*/checkpoints/*.tmp-*")) and not list(place.glob("runs/*/latest"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_one_rank_stops_and_saves(number: int, code: int, place: Path) -> None:
    with started(place, "train", "r.toml", "--train.steps", "100000", "--json") as job:
        run = job.steps(3)
        os.kill(job.ranks()[1], number)
        done = job.done()
    assert done.code == done.object["exit"] == code and done.left == ()
    assert done.block.startswith("error U-S0") and "the run is saved" in done.block
    assert jobs.checkpoints(run) == [f"step-{len(jobs.losses(run)):06d}"]


@pytest.mark.slow
def test_a_terminal_that_goes_stops_and_saves(place: Path) -> None:
    """SIGHUP, and from then on nobody reads what is said."""
    with started(place, "train", "r.toml", "--train.steps", "100000", "--json") as job:
        run = job.steps(3)
        job.process.send_signal(signal.SIGHUP)
        done = job.done()
    assert done.code == done.object["exit"] == 75 and done.left == ()
    assert jobs.checkpoints(run) == [f"step-{len(jobs.losses(run)):06d}"]


def test_ctrl_c_while_it_is_imported_leaves_no_traceback(place: Path) -> None:
    """A module that takes its time is imported first of all, and says when."""
    (place / "argparse.py").write_text("import sys, time\nprint('here', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", "r.toml"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)  # the import takes a minute
    assert (process.returncode, err) == (130, "")
