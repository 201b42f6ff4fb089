"""The command line answers at once, in the contract's shapes: data on stdout, errors last on stderr, known exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import cli
from unisono.spec.errors import HangError, Infeasible, UnisonoError, VerifyMismatch
from unisono.verbs.doctor import DoctorVerb


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Gives `doctor` another inside: the shortest verb stands for all."""

    def put(function, failed: int = 0) -> None:
        monkeypatch.setattr(DoctorVerb, "run", lambda self, call: function(call))
        monkeypatch.setattr(DoctorVerb, "failed", failed)

    return put


def test_bare_is_five_examples(run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("unisono ") for line in lines)


def test_help_names_every_verb_of_the_contract(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in ("train", "verify", "report", "doctor", "export", "config", "bench", "lab", "dash"):
        assert f"  {name} " in out


@pytest.mark.parametrize("name", list(cli.summaries()))
def test_every_verb_has_help(run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"unisono {name}" in out
    assert "--json" in out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "did you mean train?"),
        (["train", "--jsn"], "did you mean --json?"),
        (["train", "--resum", "x"], "did you mean --resume?"),
        (["train", "--train.stpes", "3"], "did you mean train.steps?"),
        (["train", "--plan", "ddp=2"], "did you mean dp?"),
        (["train", "a.toml", "b.toml"], "b.toml"),
        (["train", "--demo", "a.toml"], "a.toml"),
        (["train", "none.toml"], "no such recipe file"),
        (["train", "--resume", "none"], "no such run folder"),
        (["report", "none"], "no such run folder"),
        (["report"], "RUN"),
        (["verify", "--steps", "0"], "at least one step"),
        (["config", "shwo"], "shwo"),
        (["config", "diff", "a"], "takes 2 files"),
        (["doctor", "hang", "x"], "no such run folder"),
        (["--quiet"], "without a verb"),
    ],
)
def test_usage_errors_are_one_block_and_exit_2(run, words: list[str], hint: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error U-")
    assert hint in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("  try ")


def test_json_errors_are_one_object_on_stdout(run) -> None:
    code, out, err = run("train", "--train.stpes", "3", "--train.lr", "x", "--json")
    found = json.loads(out)
    assert code == found["exit"] == 2
    assert found["schema_version"] == 1
    assert len(found["problems"]) == 2
    assert "error U-" in err


def test_dry_run_prints_what_would_run(run) -> None:
    code, out, _ = run("train", "--demo", "--dry-run", "--train.steps", "7")
    assert code == 0
    for words in (
        "dp=2 pp=2",
        "ranks        4",
        "global_batch 32 = micro_batch",
        "steps = 7  # flag --train.steps",
    ):
        assert words in out
    code, out, _ = run("train", "--demo", "--dry-run", "--json")
    found = json.loads(out)
    assert (code, found["ranks"], found["batch"]["global_batch"]) == (0, 4, 32)


def test_verify_takes_many_plans_and_flags(run) -> None:
    words = [
        "verify",
        "--demo",
        "--plan",
        "dp=2",
        "--plan",
        "tp=2 pp=2",
        "--dtype",
        "float64",
        "--dry-run",
        "--json",
    ]
    code, out, _ = run(*words)
    found = json.loads(out)
    assert code == 0
    assert len(found["plans"]) == 2
    assert all("precision=fp64" in plan for plan in found["plans"])


def test_config_show_check_schema_diff(run) -> None:
    Path("a.toml").write_text("seed = 1\n")
    Path("b.toml").write_text("seed = 2\n[train]\nsteps = 5\n")
    code, out, _ = run("config", "show", "b.toml")
    assert code == 0
    assert "steps = 5  # b.toml:3" in out
    code, out, _ = run("config", "check", "b.toml", "--plan", "dp=2")
    assert code == 0
    assert out.startswith("ok  plan dp=2")
    code, out, _ = run("config", "schema")
    assert json.loads(out)["title"] == "Unisono recipe"
    code, out, _ = run("config", "diff", "a.toml", "b.toml")
    assert out.splitlines() == [
        "seed         1 (a.toml:1)  ->  2 (b.toml:1)",
        "train.steps  100 (default)  ->  5 (b.toml:3)",
    ]
    code, out, _ = run("config", "diff", "a.toml", "b.toml", "--json")
    assert [row["key"] for row in json.loads(out)["differences"]] == ["seed", "train.steps"]


def test_run_folders_are_recipes_too(run) -> None:
    _, text, _ = run("config", "show", "--demo")
    run_dir = Path("runs/demo/one")
    run_dir.mkdir(parents=True)
    (run_dir / "config.resolved.toml").write_text(text)
    for name in ("runs/demo/one", "runs/demo"):
        code, out, _ = run("train", "--resume", name, "--plan", "shard=2 tp=2", "--dry-run", "--json")
        assert code == 0
        found = json.loads(out)
        assert (found["resume"], found["ranks"]) == ("runs/demo/one", 4)
        assert found["recipe"]["name"] == "demo"


def test_a_started_world_must_be_the_plans(run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    code, _, err = run("train", "--plan", "dp=4", "--dry-run")
    assert code == 2
    assert "6 were started" in err
    code, out, _ = run("train", "--plan", "dp=-1", "--dry-run", "--json", "--train.global_batch", "6")
    assert json.loads(out)["ranks"] == 6


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnisonoError("x"), 1),
        (VerifyMismatch("x"), 3),
        (Infeasible("x"), 5),
        (MemoryError(), 5),
        (HangError("x", rank=1, host="a"), 6),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("a bug"), 1),
        (SystemExit(7), 7),
    ],
)
def test_every_exception_has_its_code(run, verb, error: BaseException, code: int) -> None:
    def raises(call):
        raise error

    verb(raises)
    got, out, err = run("doctor")
    assert (got, out) == (code, "")
    if not isinstance(error, SystemExit):
        assert [line for line in err.splitlines() if line.startswith("error U-")] != []
        assert "error U-" in err[err.rindex("error U-") :]


def test_an_error_is_left_in_the_run_folder(run, verb, tmp_path: Path) -> None:
    def raises(call):
        error = HangError("rank 1 did not join", rank=1, fix="look")
        error.run_dir = tmp_path
        raise error

    verb(raises)
    code, _, err = run("doctor")
    found = json.loads((tmp_path / "error.json").read_text())
    assert code == found["exit"] == 6
    assert found["rank"] == 1
    assert err.splitlines()[-1] == "  try     look"
    assert [p.name for p in tmp_path.iterdir()] == ["error.json"]


def test_an_object_that_did_not_pass_gives_the_verbs_code(run, verb) -> None:
    verb(lambda call: {"pass": False, "loss": float("nan")}, failed=3)
    code, out, _ = run("doctor", "--json")
    assert code == 3
    assert json.loads(out) == {"schema_version": 1, "pass": False, "loss": None}


def test_prints_on_the_way_do_not_spoil_the_object(run, verb) -> None:
    def chatty(call):
        print("hello")
        return {"ok": True}

    verb(chatty)
    code, out, err = run("doctor", "--json")
    assert (code, json.loads(out), err) == (0, {"schema_version": 1, "ok": True}, "hello\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "--help"], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_version(run) -> None:
    from unisono import __version__

    assert run("--version")[:2] == (0, f"unisono {__version__}\n")
