"""`unisono train` with samplers beside its ranks computes what it computes without, and outlives none of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.verbs.jobs import error_of, runs_of, started, unisono
from unisono.observe.metrics import read_steps
from unisono.report.collect import collect
from unisono_contrib.report.lengths import read

pytestmark = pytest.mark.timeout(120)

RECIPE = """
name = "sums"
[model]
kind = "gpt"
n_layer = 1
n_head = 2
d_model = 32
context = 8
positions = "rotary"
[data]
source = "sums"
packing = "none"
[post]
kind = "grpo"
group = 4
max_new_tokens = 3
sft_steps = 30
temperature = 1.5
[train]
steps = 36
global_batch = 32
micro_batch = 4
lr = 1e-2
[out]
report = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("samplers")
    (place / "sums.toml").write_text(RECIPE)
    return place


def trained(folder: Path, name: str, plan: str, *keys: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """(lines of the metrics, the bytes of the last weights) of a run."""
    done = unisono(folder, "train", "sums.toml", "--json", "--name", name, "--plan", plan, *keys)
    assert done.code == 0 and done.left == (), done.err
    steps, _ = read_steps(folder / done.object["run_dir"] / "metrics.jsonl")
    lengths = read(collect(folder / done.object["run_dir"]))
    assert lengths is None or (lengths.lost == lengths.ahead == 0 and lengths.drawn == lengths.trained)
    files = sorted((folder / done.object["checkpoint"]).glob("*.safetensors"))
    return steps, [path.read_bytes() for path in files]


def test_samplers_change_no_bit(folder: Path) -> None:
    """Drawn by ranks or by one or two processes beside them: the same losses and weights, and log-probabilities equal
    the trainer's."""
    steps, weights = trained(folder, "here", "dp=2 sync=canonical")
    assert any(step["grad_norm"] > 0 for step in steps[30:])  # some group has more than one reward
    for samplers in ("1", "2"):
        beside, same = trained(folder, f"by{samplers}", "dp=2 sync=canonical", "--post.samplers", samplers)
        assert same == weights
        assert [step["loss"] for step in beside] == [step["loss"] for step in steps]
        assert {(step["logprob_gap"], step["staleness"]) for step in beside[30:]} == {(0.0, 0.0)}


@pytest.mark.slow
def test_a_bound_lets_samplers_draw_ahead_and_no_further(folder: Path) -> None:
    """Stale samples have the same bits wherever they are drawn."""
    keys = ("--post.max_staleness", "2")
    steps, weights = trained(folder, "ahead", "dp=2 sync=canonical", *keys)
    beside, same = trained(folder, "aside", "dp=2 sync=canonical", *keys, "--post.samplers", "2")
    assert same == weights and [step["loss"] for step in beside] == [step["loss"] for step in steps]
    assert [step["staleness"] for step in beside[30:]] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(("samplers", "killed"), [(1, [0]), (2, [0]), (2, [0, 1])])
def test_a_killed_sampler_changes_nothing(
    folder: Path, tmp_path: Path, samplers: int, killed: list[int]
) -> None:
    _, weights = trained(folder, "unharmed", "dp=1 sync=canonical", "--train.steps", "60")
    (tmp_path / "sums.toml").write_text(RECIPE)
    argv = (
        "--json",
        "--plan",
        "dp=1 sync=canonical",
        "--train.steps",
        "60",
        "--post.samplers",
        str(samplers),
    )
    with started(tmp_path, "train", "sums.toml", *argv) as job:
        job.steps(31)
        beside = sorted(job.ranks())[1:]  # samplers are forked after the rank
        for number in killed:
            os.kill(beside[number], signal.SIGKILL)
        done = job.done()
    assert done.code == 0 and done.left == (), done.err
    assert all(f"sampler {number} is lost" in done.err for number in killed), done.err
    lengths = read(collect(tmp_path / done.object["run_dir"]))
    assert lengths is not None and lengths.lost == 0 and lengths.alike
    files = sorted((tmp_path / done.object["checkpoint"]).glob("*.safetensors"))
    assert [path.read_bytes() for path in files] == weights


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_meets_the_samplers_again(tmp_path: Path, victim: int) -> None:
    """Sequences that were asked for before are asked for anew."""
    (tmp_path / "sums.toml").write_text(RECIPE)
    argv = ("--json", "--plan", "dp=2 sync=canonical", "--train.steps", "80", "--post.samplers", "1")
    with started(tmp_path, "train", "sums.toml", *argv, "--post.max_staleness", "1") as job:
        job.steps(33)
        os.kill(sorted(job.ranks())[victim], signal.SIGKILL)
        done = job.done()
    assert done.code == 0 and done.left == (), done.err
    assert done.object["restarts"] == 1 and done.object["steps"] == 80, done.err


# Data is read before ranks and samplers are forked: what it plants is in all of them.
WRONG = """
from dataclasses import replace

from unisono_contrib.train.data.sources.sums import Sums


class Wrong(Sums):
    def load(self, data, model):
        from unisono_contrib.train.samplers import process
        from unisono_contrib.train.samplers.weights import WeightHolder

        class WrongHolder(WeightHolder):
            def put(self, version, weights):
                if version == 0 or {late}:
                    super().put(version, weights)
                self.acknowledged = version
                self.version = max(0, version - 2)  # of what it goes on to draw from

            def held(self):
                return replace(super().held(), version=self.acknowledged)

        usual = process.holder_of
        process.holder_of = lambda *args: WrongHolder(usual(*args).model, usual(*args).ties.items())
        return super().load(data, model)
"""


@pytest.mark.parametrize(
    ("late", "code", "says"),
    [
        (True, "U-O06", "sampler 0 drew the samples of step 2 from version 0, 2 behind, with a bound of 1"),
        (False, "U-O05", "sampler 0 does not compute with version 1 of the weights"),
    ],
)
def test_a_sampler_that_draws_from_old_weights_ends_the_run(
    tmp_path: Path, late: bool, code: str, says: str
) -> None:
    """Acknowledged and not drawn from, or acknowledged and not held."""
    (tmp_path / "sums.toml").write_text(RECIPE.replace('"sums"\npacking', '"wrong.py:Wrong"\npacking'))
    (tmp_path / "wrong.py").write_text(WRONG.replace("{late}", str(late)))
    keys = ("--post.samplers", "1", "--post.max_staleness", "1", "--post.sft_steps", "0")
    done = unisono(tmp_path, "train", "sums.toml", "--plan", "dp=1", "--train.lr", "0.1", *keys)
    assert (done.code, done.left) == (1, ()), done.err
    assert done.block.startswith(f"error {code}  ") and says in done.block, done.err
    assert error_of(runs_of(tmp_path)[-1])["code"] == code


def test_samplers_need_a_supervisor_of_ours(folder: Path) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    done = unisono(folder, "train", "sums.toml", "--post.samplers", "1", environ=environ)
    assert done.code == 2 and "U-L16" in done.err, done.err
