"""The gradient's way out: who has one, what replicas tell each other beside it, and what the update makes of it."""

from functools import partial
from pathlib import Path

import pytest
import torch

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.sync import Verdict
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step

MODELS = Path(__file__).parents[1] / "odd_models.py"
SELDOM, SPARE = "stem.seldom", "stem.spare"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question: " * 40)
    return str(path)


def started(ctx, text, kind, plan, **train):
    """A run and its batches, of one of the odd models or a small GPT, in float64."""
    keys = {"n_layer": 2, "n_head": 2, "d_model": 16, "dropout": 0.1} if kind == "gpt" else {}
    keys["kind"] = kind if kind == "gpt" else f"{MODELS}:{kind}"
    recipe = Recipe(
        seed=3,
        model=ModelConfig(context=8, **keys),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(
            **{
                "steps": 9,
                "global_batch": 8,
                "micro_batch": 1,
                "dtype": "float64",
                "lr": 1e-2,
                "clip": 0.5,
                **train,
            }
        ),
    )
    precision = "" if train.get("dtype") else " precision=fp64"
    resolved = resolve(recipe, f"{plan}{precision}", ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    return run, feeds(resolved.recipe, resolved.plan, corpus, place.device)[0]


def stepped(ctx, text, kind, plan, steps=4, change="", **train):
    """What this rank holds after some steps: losses, boxes of weights, and how often each was updated."""
    run, feed = started(ctx, text, kind, plan, **train)
    if change:
        run.sync = run.gradients.sync = CHANGES[change](run.sync)
    reports = [
        train_step(run, feed.fetch(step, run.leaves), stop=partial(bool, step == 2 and ctx.rank == 1))
        for step in range(steps)
    ]
    state = run.update.optimizer.state
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.norm for report in reports],
        "stops": [report.stop for report in reports],
        "verdicts": [report.verdict.value for report in reports],
        "made": run.step,
        "boxes": [(s.name, s.shape, s.start, s.master.tolist()) for s in run.local.slots],
        "updates": {s.name: int(state[s.master]["step"]) for s in run.local.slots if s.master in state},
    }


def weights(results):
    """Name → whole tensor, put together from the boxes of all ranks."""
    whole = {}
    for result in results:
        for name, shape, start, values in result["boxes"]:
            part = torch.tensor(values, dtype=torch.float64)
            full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            if part.numel():
                box = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                full[box] = part
    return whole


def same_as_one_device(threads, text, kind, plan, ranks, **more):
    (one,), many = (
        threads(stepped, 1, text=text, kind=kind, plan="dp=1", **more),
        threads(stepped, ranks, text=text, kind=kind, plan=plan, **more),
    )
    want, got = weights([one]), weights(many)
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, rtol=1e-10, atol=1e-12), name
    for result in many:
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert result["norms"] == pytest.approx(one["norms"], rel=1e-9)
        for name, count in result["updates"].items():
            assert count == one["updates"].get(name, count), name
    return one, many


# Who has a gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "plan", "ranks"),
    [
        ("odd", "dp=2", 2),
        ("odd", "dp=2 sync=canonical", 2),
        ("odd", "dp=2 pp=2", 4),
        ("tied", "dp=2 pp=2", 4),
        ("split", "tp=2", 2),
        ("split", "dp=2 tp=2", 4),
        ("split", "dp=2 tp=2 sync=canonical", 4),
    ],
)
def test_a_parameter_without_a_gradient_is_skipped_and_one_that_some_rank_has_is_summed(
    kind, plan, ranks, text, threads
):
    one, _ = same_as_one_device(threads, text, kind, plan, ranks)
    assert one["updates"][SPARE] == 0
    assert 0 < one["updates"][SELDOM] < one["updates"]["blocks.0.up.weight"] == 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_under_sharding_too(zero, text, threads):
    one, _ = same_as_one_device(threads, text, "still", f"dp=2 shard=2 zero={zero}", 4)
    assert one["updates"][SPARE] == 0


def test_a_tied_weight_of_two_stages_without_a_gradient_is_skipped(text, threads):
    one, many = same_as_one_device(threads, text, "twins", "pp=2", 2)
    assert one["updates"][SPARE] == 0
    assert all(result["updates"]["head.spare"] == 0 for result in many if "head.spare" in result["updates"])


@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "dp=2 sync=canonical"])
def test_a_tied_weight_that_does_not_learn_stays_under_both_names(plan, text, threads):
    one, many = same_as_one_device(threads, text, "tied_frozen", plan, 2)
    for result in (one, *many):
        assert not {"stem.table.weight", "head.out.weight"} & result["updates"].keys()
        assert result["updates"]


# What travels beside gradients ---------------------------------------------------------------------------------------


class Changed:
    """A policy in place of the one inside."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Silent(Changed):
    """Replicas never meet."""

    def grad_ready(self, bucket):
        pass


class Coarse(Changed):
    """A codec: what it is given arrives as zeros."""

    def grad_ready(self, bucket):
        bucket.flat.zero_()
        self.inner.grad_ready(bucket)


class Elsewhere(Silent):
    """The update is made by others."""

    def settle(self):
        return Verdict.REMOTE


class Refusing(Silent):
    """No step counts."""

    def settle(self):
        return Verdict.DISCARD


CHANGES = {"silent": Silent, "coarse": Coarse, "elsewhere": Elsewhere, "refusing": Refusing}


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 sync=canonical"])
@pytest.mark.parametrize("change", ["silent", "elsewhere"])
def test_losses_and_the_wish_to_stop_are_told_though_nothing_is_summed(change, plan, text, threads):
    (one,) = threads(stepped, 1, text=text, kind="gpt", plan="dp=1", steps=1)
    first, second = threads(stepped, 2, text=text, kind="gpt", plan=plan, steps=3, change=change)
    assert first["losses"] == second["losses"]
    assert first["losses"][0] == pytest.approx(one["losses"][0], rel=1e-12)
    assert first["stops"] == second["stops"] == [False, False, True]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 sync=canonical"])
def test_a_codec_does_not_see_the_losses(plan, text, threads):
    (one,) = threads(stepped, 1, text=text, kind="gpt", plan="dp=1", steps=1)
    for result in threads(stepped, 2, text=text, kind="gpt", plan=plan, steps=3, change="coarse"):
        assert result["losses"][0] == pytest.approx(one["losses"][0], rel=1e-12)
        assert result["norms"] == [0.0, 0.0, 0.0] and result["stops"][2]


@pytest.mark.parametrize("plan", ["dp=2 pp=2", "dp=2 pp=2 sync=canonical"])
def test_a_last_stage_with_nothing_to_train_tells_its_loss(plan, text, threads):
    _, many = same_as_one_device(threads, text, "frozen", plan, 4)
    assert [result["stops"][2] for result in many] == [True] * 4


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", 2), ("tp=2 pp=2", 4), ("tp=2 sync=canonical", 2)])
def test_a_loss_of_the_models_own_is_what_it_is_on_one_device(plan, ranks, text, threads):
    """The vocabulary does not divide by two, so ranks hold parts of two sizes."""
    same_as_one_device(threads, text, "smoothed", plan, ranks)


# What counts as a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "made"), [("elsewhere", 3), ("refusing", 0)])
def test_an_update_made_elsewhere_counts_and_a_discarded_one_does_not(change, made, text, threads):
    (start,) = threads(stepped, 1, text=text, kind="gpt", plan="dp=1", steps=0)
    (result,) = threads(stepped, 1, text=text, kind="gpt", plan="dp=1", steps=3, change=change)
    assert result["made"] == made
    assert result["boxes"] == start["boxes"]


def overflowing(ctx, text):
    run, feed = started(ctx, text, "gpt", "dp=1")
    measure = run.measure
    run.measure = lambda slots, line: [torch.inf, *measure(slots, line)[1:]]
    before = [slot.master.clone() for slot in run.local.slots]
    report = train_step(run, feed.fetch(0, run.leaves))
    same = all(torch.equal(a, s.master) for a, s in zip(before, run.local.slots, strict=True))
    return [report.verdict.value, report.finite, run.step, same]


def test_the_update_judges_what_is_not_finite(text, threads):
    assert threads(overflowing, 1, text=text) == [["discard", False, 0, True]]


# What the prover sees ------------------------------------------------------------------------------------------------


def proved(ctx, text, plan):
    """Whether the optimiser clips while it steps, in training and in a proof, and the norms that a proof notes."""
    from unisono.verify.play import watched_step

    run, feed = started(ctx, text, "gpt", plan, dtype="float32", clip=0.01)
    scales, optimizer = [], run.update.optimizer
    optimizer.register_step_pre_hook(lambda one, *_: scales.append(float(getattr(one, "grad_scale", 0.0))))
    train_step(run, feed.fetch(0, run.leaves))
    seen = watched_step(run, feed, range(1, 2))
    return [scales, {kind: _norm(seen, kind) for kind in ("raw", "grad")}]


def _norm(seen, kind):
    parts = [x.double().square().sum() for key, x in seen._boxes.items() if key.startswith(kind)]
    return float(torch.stack(parts).sum().sqrt())


@pytest.mark.parametrize("plan", ["dp=1", "dp=1 sync=canonical"])
def test_a_proof_watches_the_update_that_training_makes(plan, text, threads):
    (((trained, watched), norms),) = threads(proved, 1, text=text, plan=plan)
    assert trained > 1.0 and watched > 1.0
    assert norms["raw"] > 0.1
    assert norms["grad"] == pytest.approx(0.01, rel=1e-4)
