"""Killed and resumed, a run goes on as if nothing had happened: to the last bit under the same plan.

Also a command: `python -m tests.verbs.test_resume` kills a run at a random step, resumes it under the same plan and
under another, and prints what became of the losses.
"""

import os
import random
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import Done, checkpoints, losses, started, unisono
from unisono import cli
from unisono.verbs.train.folder import finished

pytestmark = pytest.mark.timeout(300)

STEPS = 30
KILLS = range(
    12, STEPS - 4
)  # two checkpoints are there by then, even if written beside the steps; and not yet over
OTHER_PLAN = "tp=2 shard=2"


@dataclass(frozen=True)
class Pair:
    """A run that was never killed, and one of the same recipe that was: `after` losses had been written then."""

    whole: Path
    ended: Done
    killed: Path
    after: int
    left: list[int]

    def copy(self, place: Path) -> Path:
        """The killed run, to go on from: several tests do."""
        return Path(shutil.copytree(self.killed, place / self.killed.name))


def make_pair(place: Path, dtype: str, *killed_flags: str) -> Pair:
    """Train one recipe twice, and `kill -9` the second run's whole group at a random step, or at that of the shell's
    KILL_STEP, which is printed to repeat it."""
    at = int(os.environ.get("KILL_STEP") or random.SystemRandom().choice(KILLS))
    print(f"KILL_STEP={at}")
    whole = jobs.folder_with(place / "whole", dtype=dtype)
    ended = unisono(whole, "train", "recipe.toml", "--json")
    doomed = jobs.folder_with(place / "killed", dtype=dtype)
    # The texts lie at different paths, and a path is part of a recipe: both read the first.
    (doomed / "recipe.toml").write_text((whole / "recipe.toml").read_text())
    with started(doomed, "train", "recipe.toml", *killed_flags) as job:
        killed = job.steps(at)
        left = job.kill_group()
    return Pair(jobs.runs_of(whole)[-1], ended, killed, len(losses(killed)), left)


def same_tensors(a: Path, b: Path) -> list[str]:
    """Names of the tensors of two checkpoints that differ in any bit."""
    import torch

    from unisono.train.state.checkpoint import read_full

    def bits(value: "torch.Tensor") -> "torch.Tensor":
        return value.reshape(-1).view(torch.uint8)  # so that NaN equals itself and 0.0 is not -0.0

    x, y = read_full(a), read_full(b)
    assert x.keys() == y.keys() and len(x) > 20
    return [name for name in x if not torch.equal(bits(x[name]), bits(y[name]))]


@pytest.fixture(scope="session")
def in_float64(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("float64"), "float64")


@pytest.fixture(scope="session")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Here the killed run writes its checkpoints beside the steps, the other one between them."""
    return make_pair(tmp_path_factory.mktemp("float32"), "float32", "--train.async_save")


def test_nobody_outlives_the_killed_group(in_float64: Pair) -> None:
    assert in_float64.left == []
    assert KILLS.start <= in_float64.after < STEPS


def test_resumed_it_is_bit_identical(in_float64: Pair, tmp_path: Path) -> None:
    run = in_float64.copy(tmp_path)
    newest = checkpoints(run)[-1]
    done = unisono(tmp_path, "train", "--resume", str(run), "--json")
    assert done.code == 0, done.err
    assert done.object["resumed_from"] == newest
    assert done.object["run_dir"] == str(run), "the id survives"
    assert losses(run) == losses(in_float64.whole)
    assert len(losses(run)) == STEPS
    last = f"checkpoints/step-{STEPS:06d}"
    assert same_tensors(run / last, in_float64.whole / last) == []


def test_resumed_under_another_plan_it_is_equal_to_rounding(in_float64: Pair, tmp_path: Path) -> None:
    run = in_float64.copy(tmp_path)
    done = unisono(tmp_path, "train", "--resume", str(run), "--plan", OTHER_PLAN, "--json")
    assert done.code == 0, done.err
    assert done.object["plan"].startswith("shard=2")
    assert largest_difference(losses(run), losses(in_float64.whole)) < 1e-6
    config = tomllib.loads((run / "config.resolved.toml").read_text())
    assert config["plan"] == done.object["plan"], "the next resume goes on so"


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(in_float32: Pair, tmp_path: Path) -> None:
    run = in_float32.copy(tmp_path)
    *_, older, newest = checkpoints(run)
    file = next((run / "checkpoints" / newest).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    done = unisono(tmp_path, "train", "--resume", str(run), "--json", "--train.async_save")
    assert done.code == 0, done.err
    assert f"{newest} is damaged" in done.err and f"going on from {older}" in done.err
    assert done.object["resumed_from"] == older
    assert losses(run) == losses(in_float32.whole), "bit-identical, saving beside the steps or between them"
    last = f"checkpoints/step-{STEPS:06d}"
    assert same_tensors(run / last, in_float32.whole / last) == []


def test_another_seed_is_refused_and_changes_nothing(in_float64: Pair, tmp_path: Path) -> None:
    run = in_float64.copy(tmp_path)
    before = _kept_in(run)
    done = unisono(tmp_path, "train", "--resume", str(run), "--seed", "5", "--json")
    assert done.code == done.object["exit"] == 2 and done.left == ()
    assert done.block.startswith("error U-K05  the run was begun with seed = 0, not 5")
    assert _kept_in(run) == before


def _kept_in(run: Path) -> dict[Path, bytes]:
    """All files of a run but those that say which ranks are alive: who was killed left some, which others take away."""
    return {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent != run / "alive"
    }


def test_a_run_of_no_steps_is_told_how_to_make_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.resolved.toml").write_text(
        'name = "tiny"\n[model]\nkind = "gpt"\n[train]\nsteps = 0\n'
    )
    (tmp_path / "summary.json").write_text('{"steps": 0}')
    assert cli.main(["train", "--resume", str(tmp_path)]) == 0
    assert "--train.steps 100 would go on" in capsys.readouterr().err


def test_a_run_whose_last_checkpoint_is_gone_or_cut_is_not_finished(in_float64: Pair, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(in_float64.whole, run)
    assert finished(run, STEPS) is not None and finished(run, STEPS + 1) is None
    file = next((run / "checkpoints" / f"step-{STEPS:06d}").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert finished(run, STEPS) is None
    shutil.rmtree(file.parent)
    assert finished(run, STEPS) is None


def test_a_finished_run_has_nothing_left_to_do(in_float64: Pair) -> None:
    done = unisono(in_float64.whole, "train", "--resume", str(in_float64.whole), "--json")
    assert done.code == 0 and "Traceback" not in done.err
    assert f"nothing to do: {in_float64.whole} has made its {STEPS} steps" in done.err
    first = in_float64.ended.object
    assert {key: done.object[key] for key in ("steps", "loss", "val_loss", "plan")} == {
        key: first[key] for key in ("steps", "loss", "val_loss", "plan")
    }


def test_without_a_checkpoint_there_is_nothing_to_resume(in_float64: Pair, tmp_path: Path) -> None:
    run = in_float64.copy(tmp_path)
    shutil.rmtree(run / "checkpoints")
    done = unisono(tmp_path, "train", "--resume", str(run))
    assert done.code == 2 and done.block.startswith("error U-K06  there is no whole checkpoint")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_at_any_moment(in_float64: Pair, tmp_path: Path) -> None:
    """While torch is imported, while lines are dropped, between two renames: whatever the moment, it goes on."""
    run, chance = in_float64.copy(tmp_path), random.Random(0)
    resume = ("train", "--resume", str(run), "--train.steps", str(8 * STEPS), "--train.async_save")
    at = []
    for _ in range(10):
        at.append(chance.uniform(0.5, 6.0))
        with started(tmp_path, *resume) as job:
            if job.ends_within(at[-1]):
                break
            assert job.kill_group() == []
        assert checkpoints(run), at
    assert unisono(tmp_path, *resume).code == 0
    whole = in_float64.copy(tmp_path / "whole")
    assert unisono(tmp_path, *resume[:2], str(whole), *resume[3:-1]).code == 0
    assert losses(run) == losses(whole), at
    assert not [name for name in (run / "checkpoints").iterdir() if "." in name.name], (
        "what kills left is cleaned away"
    )


def largest_difference(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest relative difference of two curves of the same steps."""
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in b)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        good = True
        for dtype in ("float64", "float32"):
            pair = make_pair(place / dtype, dtype)
            print(
                f"{dtype}  dp=2 pp=2, kill -9 of the launcher's group after {pair.after} of {STEPS} steps; ",
                end="",
            )
            print(
                f"left behind: {len(pair.left)} processes; newest checkpoint {checkpoints(pair.killed)[-1]}"
            )
            expected = losses(pair.whole)
            for plan in ("dp=2 pp=2", OTHER_PLAN):
                run = pair.copy(place / dtype / plan.replace(" ", "-"))
                done = unisono(place, "train", "--resume", str(run), "--plan", plan, "--json")
                if done.code:
                    print(done.err)
                    return 1
                found = losses(run)
                same = sum(found[step] == expected[step] for step in expected)
                worst = largest_difference(found, expected)
                print(
                    f"    resumed under {plan}: {same} of {STEPS} losses bit-identical, largest relative difference {worst:.1e}"
                )
                good &= worst == 0 if plan != OTHER_PLAN else worst < (1e-6 if dtype == "float64" else 1e-3)
                good &= not pair.left
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp=4", "micro_batch 2 x micros 1 x replicas 4"),  # 4 rows of each do not make 8: half of them
        ("dp=2 micros=2", "micro_batch 2 x micros 2 x replicas 2"),
        ("dp=1", "micro_batch 4 x micros 2 x replicas 1"),  # the old size fits, and stays
        ("dp=8", "micro_batch 1 x micros 1 x replicas 8"),
    ],
)
def test_micro_batches_follow_another_plan(
    plan: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The size that a run derived belongs to its plan; the global batch stays."""
    sizes = ["--train.global_batch", "8", "--train.micro_batch", "4"]
    assert (
        cli.main(["config", "show", "--plan", "dp=2", "--model", "mlp", "--data.source", "digits", *sizes])
        == 0
    )
    (tmp_path / "config.resolved.toml").write_text(capsys.readouterr().out)
    (tmp_path / "metrics.jsonl").touch()
    resume = ["train", "--resume", str(tmp_path), "--dry-run", "--plan", plan]
    assert cli.main(resume) == 0
    assert f"global_batch 8 = {words}" in capsys.readouterr().out
    if plan == "dp=4":  # what the command itself says stays said
        assert cli.main([*resume, "--train.micro_batch", "4"]) == 2
