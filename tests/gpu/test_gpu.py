"""On GPUs a run computes what it computes on processors, waits for the device once a step, and never forks CUDA.

Not yet run: written and reviewed on a machine without a GPU.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.verify.prover import prove

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SMALL = Recipe(
    seed=3,
    model=ModelConfig(n_layer=2, n_head=2, d_model=32, context=32, dropout=0.1),
    train=TrainConfig(steps=8, global_batch=8, lr=1e-2, warmup_steps=2, clip=0.5),
)


def gpus() -> int:
    import torch  # where there is no GPU, these tests are not to cost an import

    return torch.cuda.device_count()


def losses(tmp_path: Path, *flags: str, backend: str = "nccl", plan: str = "dp=1") -> list[float]:
    """The losses of a run of the command line."""
    command = [sys.executable, "-m", "unisono", "train", "--json", "--quiet", "--plan", plan]
    command += [
        "--model.n_layer",
        "2",
        "--model.d_model",
        "64",
        "--model.context",
        "64",
        "--train.steps",
        "8",
    ]
    command += ["--train.global_batch", "8", "--out.dir", str(tmp_path), "--out.report", "false"]
    done = subprocess.run(
        [*command, "--launch.backend", backend, *flags], check=True, capture_output=True, text=True
    )
    lines = (Path(json.loads(done.stdout)["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_gpu_trains_as_the_processor_does(tmp_path):
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, backend="gloo"), rel=1e-3)


def test_bf16_stays_near(tmp_path):
    assert losses(tmp_path, plan="dp=1 precision=bf16") == pytest.approx(losses(tmp_path), rel=3e-2)


def test_a_compiled_model_is_the_same_model(tmp_path):
    assert losses(tmp_path, "--train.compile", "true") == pytest.approx(losses(tmp_path), rel=1e-3)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    whole = losses(tmp_path, "--train.save_every", "4")
    (run,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    last = run / "checkpoints" / "step-000008"
    last.rename(tmp_path / "away")  # as if the run had been killed after step 4
    subprocess.run([sys.executable, "-m", "unisono", "train", "--resume", str(run)], check=True)
    again = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert again == pytest.approx(whole, rel=1e-3)


def cuda_of_a_rank(ctx) -> dict[str, object]:
    import torch

    from unisono.train.session import place_of

    clean = not torch.cuda._is_in_bad_fork()
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    return {"backend": ctx.backend, "clean": clean, "sum": torch.ones(3, device=place.device).sum().item()}


def test_the_helper_never_touches_cuda(nursery):
    argument = {
        "module": __name__,
        "file": __file__,
        "function": "cuda_of_a_rank",
        "group": False,
        "kwargs": {},
    }
    for _ in range(2):  # the second fork would meet what the first had left behind
        outcome = nursery.run(argument, 1, timeout=120.0)
        assert outcome.error is None, outcome.error.trace
        assert outcome.results == [{"value": {"backend": "nccl", "clean": True, "sum": 3.0}}]


def waits_of_a_step(ctx, recipe: str) -> int:
    """How often one step makes the processor wait for the GPU."""
    import torch

    from unisono.observe.span import Recorder
    from unisono.train.build import build, feeds
    from unisono.train.data.load import load
    from unisono.train.session import place_of
    from unisono.train.step import train

    got = resolve(Recipe.model_validate_json(recipe), "dp=1", 1)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    corpus = load(got.recipe.data, got.recipe.model)
    run = build(got.recipe, got.plan, place, corpus, Recorder())
    feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
    steps = train(run, feed, got.recipe.train.steps)
    for _ in range(3):
        next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(steps)
    torch.cuda.set_sync_debug_mode("default")
    feed.close()
    return sum("synchroniz" in str(one.message) for one in caught)


def test_a_step_waits_for_the_gpu_no_more_than_it_must(nursery):
    recipe = SMALL.model_copy(update={"model": SMALL.model.model_copy(update={"dropout": 0.0})})
    argument = {
        "module": __name__,
        "file": __file__,
        "function": "waits_of_a_step",
        "group": False,
        "kwargs": {"recipe": recipe.model_dump_json(exclude_unset=True)},
    }
    outcome = nursery.run(argument, 1, timeout=120.0)
    assert outcome.error is None, outcome.error.trace
    assert outcome.results[0] is not None and outcome.results[0]["value"] <= 3


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("dp=2", 2), ("shard=2 zero=1", 2), ("shard=2 zero=3", 2), ("tp=2", 2), ("pp=2", 2), ("pp=4", 4)],
)
def test_several_gpus_compute_what_one_computes(plan, ranks):
    if gpus() < ranks:
        pytest.skip(f"fewer than {ranks} GPUs here")
    double = SMALL.model_copy(update={"train": SMALL.train.model_copy(update={"dtype": "float64"})})
    deep = double.model_copy(update={"model": double.model.model_copy(update={"n_layer": 4})})
    (proof,) = prove(deep, [Plan.parse(f"{plan} precision=fp64 micros=4")], steps=3, backend="nccl")
    assert proof.passed, proof


def test_the_benchmark_runs():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--seconds", "2", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    assert rows and all(row["loss_difference"] < 1e-2 for row in rows)
