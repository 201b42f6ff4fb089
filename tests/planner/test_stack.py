"""A user's own measured run: one scalar, with which its price is the measurement and all others move as it does."""

import json
from pathlib import Path

import pytest

from benchmarks.fitting.accuracy import by_one
from unisono.cli import main
from unisono.planner.stack import stack

RECIPE = """
[model]
kind = "gpt"
n_layer = 4
n_head = 8
d_model = 512
context = 512
vocab = 512
[train]
global_batch = 64
"""
PLAN = "shard=8 precision=bf16"
RUN = f'[run]\nrecipe = "my.toml"\ncluster = "dgx-h100"\nplan = "{PLAN}"\nstep_s = 0.25\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answered(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def priced(capsys: pytest.CaptureFixture[str], *more: str, plan: str = PLAN) -> float:
    return answered(["simulate", "my.toml", "--cluster", "dgx-h100", "--plan", plan, *more], capsys)["step_s"]


def test_a_measured_run_is_priced_as_it_was_and_others_move_with_it(folder: Path, capsys) -> None:
    (folder / "mine.toml").write_text(f'like = "plain"\n{RUN}')
    own = ("--stack", "mine.toml")
    assert priced(capsys, *own) == pytest.approx(0.25, rel=1e-6)
    factor = 0.25 / priced(capsys)
    for plan in ("dp=8 precision=bf16", "tp=8 precision=bf16", "dp=2 pp=4 precision=bf16"):
        assert priced(capsys, *own, plan=plan) == pytest.approx(factor * priced(capsys, plan=plan), rel=0.1)
    (folder / "by.toml").write_text(f'like = "plain"\nfactor = {factor}\n')
    assert priced(capsys, "--stack", "by.toml") == pytest.approx(0.25, rel=0.02)
    (folder / "same.toml").write_text('like = "plain"\nfactor = 1.0\n')
    assert priced(capsys, "--stack", "same.toml") == pytest.approx(priced(capsys), rel=1e-12)
    assert main(["plan", "my.toml", "--cluster", "dgx-h100", "--stack", "mine.toml"]) == 0
    assert "priced as the software stack mine x" in capsys.readouterr().out


def test_a_stack_of_ones_own_may_change_any_constant(folder: Path, capsys) -> None:
    (folder / "half.toml").write_text(
        'like = "plain"\nmatmul = 0.3\nslack = { value = 0.2, source = "my logs" }\n'
    )
    made = stack(str(folder / "half.toml"))
    assert (made.matmul, made.slack, made.attention) == (0.3, 0.2, stack("plain").attention)
    assert priced(capsys, "--stack", "half.toml") > priced(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('like = "plain"\nfactor = 0\n', "bad.toml:2"),
        (f'like = "plain"\nfactor = 2\n{RUN}', "[run]"),
        ('like = "plane"\n', "plain"),
        ("factor = 2\n", "like"),
        ('like = "plain"\nfaktor = 2\n', "factor"),
        (f'like = "plain"\n{RUN.replace("step_s", "steps")}', "step_s"),
        (f'like = "plain"\n{RUN.replace("step_s = 0.25", "")}', "step_s is missing"),
        (f'like = "plain"\n{RUN.replace("0.25", "1e-9")}', "so few seconds"),
        (f'like = "plain"\n{RUN.replace("my.toml", "other.toml")}', "other.toml"),
        (f'like = "plain"\n{RUN.replace("shard=8", "shard=7")}', "multiple of 7"),
        ("like = plain\n", "bad.toml:1"),
    ],
)
def test_a_bad_file_is_one_error_that_names_its_place(folder: Path, text: str, said: str, capsys) -> None:
    (folder / "bad.toml").write_text(text)
    words = ["simulate", "my.toml", "--cluster", "dgx-h100", "--plan", PLAN, "--stack", "bad.toml"]
    told = answered(words, capsys, code=2)
    assert said in json.dumps(told)


def test_one_row_as_the_users_own_run() -> None:
    assert by_one([0.2, 0.2, 0.2]) == pytest.approx([0.0] * 6)
    assert by_one([0.0, 1.0]) == pytest.approx([1.0, -0.5])
