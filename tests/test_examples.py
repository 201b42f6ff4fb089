"""The examples do what they say, on tiny settings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.library import scenes
from tests.ports import kept_port
from tests.ranks import World
from tests.verbs.jobs import unisono
from unisono import config

EXAMPLES = Path(__file__).parents[1] / "examples"
OURS = re.compile(r"^.*(?:\bunisono\b|\bjob\b).*\n", re.MULTILINE)


def without_our_lines(text: str) -> tuple[str, int]:
    """A script without its docstring and without the lines that speak of us; how many those were."""
    body = text.split('"""\n', 1)[1]
    alone = body.replace("    if job.is_main:\n        ", "    ")  # what it guards stays
    return OURS.sub("", alone), len(OURS.findall(body))


@pytest.mark.timeout(120)
def test_three_lines_make_no_difference(world: World) -> None:
    """Taken away they leave a script for one device; its losses are those of two ranks on the same global batches."""
    text = (EXAMPLES / "own_loop.py").read_text()
    alone, taken = without_our_lines(text)
    assert taken == 5  # the three, and two for what is printed
    (one,) = world(scenes.script, 1, group=False, text=alone)
    two = world(scenes.script, 2, text=text)
    assert len(one["losses"]) == 44
    for whole, a, b in zip(one["losses"], *(rank["losses"] for rank in two), strict=True):
        assert (a + b) / 2 == pytest.approx(whole, abs=1e-10)


@pytest.mark.timeout(120)
def test_own_loop_on_two_ranks_ends_well(tmp_path: Path) -> None:
    """Started by hand; under torchrun below, and a recipe each time in tests/verbs/test_by_others.py."""
    with kept_port() as port:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        script = [str(EXAMPLES / "own_loop.py")]
        ranks = [Forked(script, tmp_path, {**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
        said = [(rank.stdout.read(), rank.stderr.read(), rank.wait()) for rank in ranks]
    assert [code for _, _, code in said] == [0, 0], said
    told = [err.count("note  U-V06: this script") for _, err, _ in said]
    assert told == [1, 0], "the first rank tells whether it is proven"
    printed = [re.findall(r"epoch 3  loss (\d\.\d{4})", out) for out, _, _ in said]
    assert [len(one) for one in printed] == [1, 0], "the first rank prints, and it alone"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_own_loop_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(EXAMPLES / "own_loop.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert len(re.findall(r"epoch 3  loss (\d\.\d{4})", done.stdout)) == 1, (
        "the first rank prints, and it alone"
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chats_are_learnt_and_asked_for_answers(tmp_path: Path) -> None:
    """The losses and what a function of one's own says are the same under three plans."""
    subprocess.run([sys.executable, str(EXAMPLES / "make_chats.py")], cwd=tmp_path, check=True)
    told = []
    for plan in ("dp=1", "dp=3", "tp=2 pp=2"):
        done = unisono(
            tmp_path, "train", str(EXAMPLES / "chats.toml"), "--json", "--plan", plan, "--train.steps", "4",
            "--train.evaluate", f"{EXAMPLES / 'answers.py'}:exact", "--data.cache", str(tmp_path / "cache"),
            "--train.dtype", "float64", "--train.eval_batches", "1", "--model.n_layer", "2", "--model.d_model", "32", "--train.global_batch", "12", "--out.report", "false",
        )  # fmt: skip
        assert done.code == 0, done.err
        summary = done.object
        lines = [
            json.loads(line)
            for line in Path(tmp_path, summary["run_dir"], "metrics.jsonl").read_text().splitlines()
        ]
        assert lines[-1]["val_exact"] == summary["val_metrics"]["exact"]
        told.append(
            [*(line["loss"] for line in lines), summary["val_loss"], summary["val_metrics"]["accuracy"]]
        )
    assert told[1] == pytest.approx(told[0], rel=1e-9) and told[2] == pytest.approx(told[0], rel=1e-9)


@pytest.mark.timeout(120)
def test_text_is_the_same_each_time_and_trains(tmp_path: Path) -> None:
    """The recipe of nanoGPT's size on that text, three steps of it."""
    for name in ("english.txt", "again.txt"):
        made = [sys.executable, str(EXAMPLES / "make_text.py"), name, "20000"]
        subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    assert len((tmp_path / "english.txt").read_bytes()) == 20000
    assert (tmp_path / "english.txt").read_bytes() == (tmp_path / "again.txt").read_bytes()
    done = unisono(
        tmp_path, "train", str(EXAMPLES / "nanogpt_cpu.toml"), "--json",
        "--train.steps", "3", "--train.eval_batches", "1", "--out.report", "false",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.object["ranks"] == 2


def test_nanogpt_recipe_has_the_size_of_its_model() -> None:
    recipe = config.load(EXAMPLES / "nanogpt_cpu.toml").recipe
    model, train = recipe.model, recipe.train
    assert (model.n_layer, model.n_head, model.d_model, model.context, model.dropout) == (4, 4, 128, 64, 0.0)
    assert (train.global_batch, train.steps, train.betas, train.clip) == (12, 2000, (0.9, 0.99), 1.0)
    assert (train.lr, train.min_lr, train.lr_schedule, train.warmup_steps) == (1e-3, 1e-4, "cosine", 100)


def test_recipe_function_is_a_recipe() -> None:
    got = config.load(f"{EXAMPLES / 'recipe.py'}:tiny")
    resolved = config.resolve(got.recipe, got.plan, None, got.origins)
    assert resolved.recipe.model.d_model == 96 and resolved.plan.world == 2


def test_own_model_predicts_from_the_past_only() -> None:
    import torch

    from unisono.models.build import Facts, build

    kind = f"{EXAMPLES / 'own_model.py'}:smoother"
    model = build(config.ModelConfig(kind=kind, d_model=16, context=12), Facts(vocab=256))
    tokens = torch.randint(256, (2, 12))
    other = tokens.clone()
    other[:, 7:] = 0
    assert model(tokens).shape == (2, 12, 256)
    torch.testing.assert_close(model(tokens)[:, :7], model(other)[:, :7])


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda p: p.name)
def test_examples_are_short(path: Path) -> None:
    lines = 0 if path.is_dir() else len(path.read_text().splitlines())
    if path.suffix == ".ipynb":  # what it shows is written once more as JSON
        lines = sum(
            len(cell["source"])
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "code"
        )
    assert lines < 60
