"""On GPUs a run computes what it computes on processors, waits for the device once a step, and never forks CUDA.

Plans of several ranks are proven with a GPU for each where there are so many. On fewer the ranks take turns
(`launch.backend=nccl:shared`): their messages are NCCL's, over sockets instead of NVLink.
"""

import json
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.config import LaunchConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.verify.prover import Proof, prove

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


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_a_compiled_model_is_the_same_model(dropout, tmp_path):
    flags = ["--model.dropout", dropout]
    assert losses(tmp_path, *flags, "--train.compile", "true") == pytest.approx(
        losses(tmp_path, *flags), rel=1e-3
    )


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

    from unisono.train.build.build import place_of

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
    from unisono.train.build.build import build, feeds, place_of
    from unisono.train.data.load import load
    from unisono.train.step.train_step import train

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
    assert outcome.results[0] is not None and outcome.results[0]["value"] == 1


ALONE = [
    "precision=bf16", "precision=fp16", "micros=4", "recompute=full", "recompute=selective",
    "offload=optimizer", "offload=params+activations",
]  # fmt: skip
TWO = [
    "dp=2", "dp=2 precision=bf16", "dp=2 sync=canonical", "dp=2 sync=priority", "dp=2 codec=int8",
    "dp=2 codec=powersgd:r=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "shard=2 offload=optimizer",
    "tp=2", "cp=2", "cp=2 cp_kind=ulysses", "pp=2 micros=4", "pp=2 micros=4 schedule=gpipe",
    "pp=2 micros=4 schedule=interleaved:v=2", "pp=2 micros=4 schedule=zb1p", "pp=2 micros=4 schedule=zbv",
    "pp=2 micros=4 schedule=dualpipev",
]  # fmt: skip
FOUR = [
    "dp=2 tp=2",
    "dp=2 pp=2 micros=2",
    "dp=2 shard=2",
    "shard=2 cp=2",
    "pp=4 micros=4",
    "pp=2 tp=2 micros=4",
    "pp=4 micros=4 schedule=zb1p",
    "pp=2 cp=2 micros=4 schedule=interleaved:v=2",
    "shard=2 pp=2 micros=2",
    "shard=2 tp=2",
    "dp=4 sync=canonical",
    "shard=4 zero=3",
]


@pytest.fixture(scope="module")
def proven() -> Callable[[str], Proof]:
    """What comes of a plan: all of one size are proven at once, as starting their ranks is most of the time."""
    found: dict[str, Proof] = {}
    launch = LaunchConfig(timeout=120.0)
    recipe = SMALL.model_copy(
        update={"launch": launch, "model": SMALL.model.model_copy(update={"n_layer": 4})}
    )

    def of(plan: str) -> Proof:
        if plan not in found:
            plans = next(plans for plans in (ALONE, TWO, FOUR) if plan in plans)
            read = [Plan.parse(one) for one in plans]
            enough = gpus() >= max(one.world for one in read)
            backend = "nccl" if enough else "nccl:shared"
            proofs = prove(recipe, read, steps=2, backend=backend, keep_going=True)
            found.update(zip(plans, proofs, strict=True))
        return found[plan]

    return of


@pytest.mark.parametrize("plan", [*ALONE, *TWO, *FOUR])
def test_a_plan_computes_what_one_gpu_computes(plan, proven):
    assert proven(plan).passed, proven(plan)


def test_products_of_eight_bits_keep_their_bound():
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no numbers of eight bits")
    (proof,) = prove(SMALL, [Plan.parse("dp=1 precision=bf16:fp8")], steps=2, backend="nccl")
    assert proof.passed, proof


def test_a_plan_and_the_one_device_it_is_held_to_are_of_one_kind():
    """Where a plan has more ranks than there are GPUs, all compute on processors: so does what it is held to."""
    plan = f"dp={2 * gpus()} sync=canonical"
    recipe = SMALL.model_copy(update={"train": SMALL.train.model_copy(update={"global_batch": 4 * gpus()})})
    (proof,) = prove(recipe, [Plan.parse(plan)], steps=1)
    assert proof.bit_identical, proof


def test_fp16_stays_near(tmp_path):
    assert losses(tmp_path, plan="dp=1 precision=fp16") == pytest.approx(losses(tmp_path), rel=3e-2)


def command(*words: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True, **more)


def test_calibrate_measures_this_gpu(tmp_path):
    import torch

    done = command("calibrate", "--out", str(tmp_path / "here.toml"))
    assert done.returncode == 0, done.stderr
    device = tomllib.loads((tmp_path / "here.toml").read_text())["device"]
    peak, known = device["peak_tflops"]["value"], torch.cuda.get_device_properties(0)
    assert peak["bf16"] > peak["fp32"] > 1.0, "TFLOP/s, of products and not of waiting"
    assert device["bandwidth_tb_s"]["value"] > 0.1
    assert device["memory_gb"]["value"] == pytest.approx(known.total_memory / 1e9, rel=1e-3)


def test_the_doctor_names_it():
    import torch

    done = command("doctor", "--json")
    seen = {check["name"]: check["detail"] for check in json.loads(done.stdout)["checks"]}
    assert torch.cuda.get_device_name() in seen["gpu"]


def test_out_of_its_memory_a_run_ends_with_the_ledger(tmp_path):
    sizes = ["--model.d_model", "768", "--model.context", "1024", "--model.vocab", "50304"]
    more = ["--train.global_batch", "2048", "--train.steps", "1", "--out.dir", str(tmp_path)]
    done = command("train", *sizes, *more, "--plan", "dp=1", "--launch.backend", "nccl")
    assert done.returncode == 5 and "U-M01" in done.stderr, done.stderr[-2000:]


TINY = ["--model.n_layer", "2", "--model.d_model", "64", "--model.context", "64", "--train.global_batch", "8"]


def test_a_rank_that_is_killed_is_replaced(tmp_path):
    """Kernels of NCCL that wait for it in vain end with their process: so all begin anew, from the newest checkpoint."""
    plan = [
        "--plan",
        "dp=2",
        "--launch.backend",
        "nccl:shared",
        "--train.steps",
        "40",
        "--train.save_every",
        "10",
    ]
    chaos = ["--chaos", "kill:who=1:step=15", "--out.report", "false"]
    done = command("train", *plan, *TINY, *chaos, "--out.dir", str(tmp_path), "--json", timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["restarts"] >= 1 and json.loads(done.stdout)["steps"] == 40


def test_the_benchmark_runs():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--seconds", "2", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    assert rows and all(row["loss_difference"] < 1e-2 for row in rows)
