"""`unisono scale`: which runs it would make, what it refuses, and two sizes for real."""

import json

import pytest

from unisono import cli

SMALL = [
    "--model.n_layer", "1", "--model.n_head", "2", "--model.d_model", "16", "--model.context", "8",
    "--train.global_batch", "8",
]  # fmt: skip


def test_a_dry_run_says_which_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", *SMALL, "--plan", "tp=2", "--ranks", "2,4", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(p["kind"], p["ranks"], p["global_batch"], p["plan"]) for p in said["points"]] == [
        ("strong", 2, 8, "tp=2"),
        ("strong", 4, 8, "dp=2 tp=2"),
        ("weak", 2, 8, "tp=2"),
        ("weak", 4, 16, "dp=2 tp=2"),
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "tp=2", "--ranks", "1,2"], "1 ranks are no multiple of the 2 of a replica"),
        (["--ranks", "0"], "no list of numbers of ranks"),
        (["--steps", "0"], "no number of steps"),
    ],
)
def test_what_cannot_be_run_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", *SMALL, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_sizes_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", *SMALL, "--ranks", "1,2", "--steps", "12", "--kind", "strong", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in said["points"]] == [1, 2]
    assert said["points"][0]["speedup"] == said["points"][0]["efficiency"] == 1
    assert all(point["verdict"]["cause"] for point in said["points"])
    assert [line.split(":")[0].split(",")[0] for line in said["advice"]][-1] == "batch"
