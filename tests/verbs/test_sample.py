"""`unisono sample` draws from a checkpoint what its seed says, and refuses what its model cannot."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import cli

KEPT = Path(__file__).parents[1] / "fixtures" / "run-f903854"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(KEPT, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return Path("runs", "canonical")


def drawn(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert cli.main(["sample", *words, "--tokens", "12", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_seed_draws_one_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = drawn(capsys, str(run), "--prompt", "to be")
    assert (
        first["text"].startswith("to be")
        and first["text"] == drawn(capsys, str(run), "--prompt", "to be")["text"]
    )
    assert first["text"] != drawn(capsys, str(run), "--prompt", "to be", "--seed", "9")["text"]
    cold = [drawn(capsys, str(run), "--temperature", "0", "--seed", seed)["text"] for seed in ("1", "2")]
    assert cold[0] == cold[1]


def test_a_checkpoint_may_be_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = run.glob("*/checkpoints/step-*")
    by_run, by_checkpoint = drawn(capsys, str(run)), drawn(capsys, str(folder))
    assert by_run == by_checkpoint and by_run["checkpoint"] == str(folder)


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--tokens", "-1"], "U-C04"), (["--temperature", "nan"], "U-C04"), (["--temperature", "-1"], "U-C04")],
)
def test_numbers_that_mean_nothing_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    assert cli.main(["sample", str(run), *words]) == 2
    assert code in capsys.readouterr().err


def test_a_run_without_a_checkpoint_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in run.glob("*/checkpoints"):
        shutil.rmtree(folder)
    assert cli.main(["sample", str(run)]) == 2
    assert "U-F03" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_diffusion_transformer_draws_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "--model.kind dit --model.n_layer 1 --model.d_model 16 --data.source digits"
    steps = "--train.steps 2 --train.global_batch 4 --plan dp=1 --no-out.report --name d --quiet"
    words = [sys.executable, "-m", "unisono", "train", *model.split(), *steps.split()]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    pictures = set()
    for seed in ("1", "1", "2"):
        flags = ["--pictures", "12", "--euler-steps", "3", "--seed", seed, "--json"]
        assert cli.main(["sample", "runs/d", *flags]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["labels"] == [*range(10), 0, 1]
        pictures.add(Path(got["picture"]).read_bytes())
    assert len(pictures) == 2
    assert cli.main(["sample", "runs/d", "--pictures", "0"]) == 2
    assert "U-C04" in capsys.readouterr().err
