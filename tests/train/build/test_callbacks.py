"""A user's functions hear of each step, validation and save, on rank 0; their errors end the run, their doings do not
reach it."""

from pathlib import Path

import pytest
import torch

from tests.train.small import recipe
from tests.train.test_session import losses, play
from unisono.config import Recipe, resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import ConfigProblems, UserCodeError
from unisono.spec.sink import RunFacts
from unisono.train.state.checkpoint import read_full
from unisono_contrib.config.sections.callbacks import CallbacksConfig
from unisono_contrib.train.build.callbacks import observer

HEARD = """
import pathlib
import torch

def hear(event):
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    number = event.metrics.get("loss", event.checkpoint and event.checkpoint.name)
    with open(pathlib.Path(__file__).with_name("heard.txt"), "a") as file:
        print(event.kind, event.step, number, file=file)

def fail(event):
    if event.step == 2:
        raise OSError("no more")
"""


def calling(folder: Path, *functions: str) -> Recipe:
    """Three steps, with a validation after the second."""
    (folder / "mine.py").write_text(HEARD)
    told = recipe(folder, steps=3, eval_every=2, eval_batches=1, dtype="float32")
    called = tuple(f"{folder / 'mine.py'}:{name}" for name in functions)
    return told.model_copy(update={"callbacks": CallbacksConfig(call=called)})


@pytest.mark.timeout(60)
def test_they_hear_all_in_order_and_change_no_bit(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    ends = play(calling(tmp_path, "hear"), "dp=2", 2, run)
    play(recipe(tmp_path, steps=3, eval_every=2, eval_batches=1, dtype="float32"), "dp=2", 2, other)
    lines = (tmp_path / "heard.txt").read_text().split("\n")[:-1]
    kinds = [" ".join(line.split()[:2]) for line in lines]
    assert kinds == ["step 1", "step 2", "validation 2", "step 3", "validation 3", "save 3"]
    assert (
        [float(line.split()[2]) for line in lines if line.startswith("step")] == losses(run) == losses(other)
    )
    assert float(lines[4].split()[2]) == ends[0]["val_loss"] and lines[5].endswith("step-000003")
    got, want = (read_full(folder / "checkpoints" / "step-000003") for folder in (run, other))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.timeout(60)
def test_an_error_of_one_ends_the_run_and_has_its_line(tmp_path: Path) -> None:
    """An OSError too, which would be a full disk's if it were ours."""
    with pytest.raises(UserCodeError, match="the callback raised OSError: no more") as caught:
        play(calling(tmp_path, "hear", "fail"), "dp=1", 1, tmp_path / "run")
    line = HEARD.split("\n").index('        raise OSError("no more")') + 1
    assert (caught.value.code, caught.value.exit) == ("R01", 1)
    assert f"mine.py:{line}" in caught.value.where
    assert len((tmp_path / "heard.txt").read_text().split("\n")[:-1]) == 2


def test_what_one_draws_and_sets_is_its_own(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    (tmp_path / "mine.py").write_text(HEARD)
    section = CallbacksConfig(call=(f"{tmp_path / 'mine.py'}:hear",))
    facts = RunFacts(tmp_path, 0, 1, "host", "gloo", {}, 0, 1, Recorder(0))
    observer(section, facts).stepped(1, {"loss": 1.0})
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


@pytest.mark.parametrize("call", ["nowhere.py:hear", "mine.py", "mine.py:1"])
def test_what_is_no_function_is_refused(tmp_path: Path, call: str) -> None:
    told = recipe(tmp_path).model_copy(update={"callbacks": CallbacksConfig(call=(call,))})
    with pytest.raises(ConfigProblems) as caught:
        resolve(told, "dp=1")
    assert {problem.where for problem in caught.value.problems} == {"callbacks.call"}
