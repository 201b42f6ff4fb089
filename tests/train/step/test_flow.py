"""PipeDream: a pipeline without a flush is one device that uses the weights of the versions that its formula says."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.programs.check import check
from unisono.programs.pipeline import bubble, lower, play_costs, with_messages
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import pieces_of, restore
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train
from unisono_contrib.comm import threads
from unisono_contrib.parallel.flow import FlowPlayer

BOTH = ["pipedream", "pipedream:buffers=2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return Recipe(
        seed=3,
        model=ModelConfig(n_layer=4, n_head=2, d_model=8, context=8, dropout=0.1, tie_embeddings=True),
        data=DataConfig(source=f"text:{folder}/text.txt"),
        train=TrainConfig(steps=6, global_batch=4, micro_batch=1, lr=1e-2, clip=0, dtype="float64"),
    )


def having(recipe, **more):
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=more)})


def on_ranks(recipe, plan, body):
    """body(run, feed, val) on every rank."""
    ranks = resolve(recipe, plan).plan.world

    def live(rank):
        resolved = resolve(recipe, plan, ranks)
        corpus = load(resolved.recipe.data, resolved.recipe.model)
        place = place_of(rank, ranks, rank, threads.BACKEND, 60.0)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(rank))
        return body(run, *feeds(resolved.recipe, resolved.plan, corpus, place.device))

    return threads.run(ranks, live)


def weights(run):
    return {slot.name: slot.master.detach().clone() for slot in run.local.slots}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The timetable -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 8])
def test_rows_are_whole_and_use_what_there_is(name, ranks, micros):
    schedule = SCHEDULES.read(name)
    if not schedule.serves(ranks, micros):
        return
    flow = schedule.flow(ranks, micros, 4)
    assert check(flow) == []
    assert lower(flow).rows == tuple(
        tuple(one for action in row for one in with_messages(flow, action)) for row in flow.rows
    )
    for stage, row in enumerate(flow.rows):
        made = 0
        for action in row:
            made += action.kind == "U"
            if action.kind == "F":
                version = schedule.version(stage, ranks, micros, action.micro)
                assert version <= made, "weights that are not there yet"
                assert version == made or schedule.buffers
                assert action.micro // micros - version <= schedule.stale(stage, ranks, micros)
        assert made == 4


def test_an_update_before_its_last_backward_is_a_fault():
    flow = SCHEDULES.read("pipedream").flow(2, 2, 2)
    row = list(flow.rows[0])
    at = next(i for i, action in enumerate(row) if action.kind == "U")
    row[at - 1], row[at] = row[at], row[at - 1]
    broken = type(flow)((tuple(row), *flow.rows[1:]), flow.placement, flow.micros)
    assert check(broken) == [f"row 0 has {flow.rows[0][at]} before {flow.rows[0][at - 1]}"]


def test_the_bubble_is_paid_once_and_not_each_step():
    """1f1b wastes (p-1)/(m+p-1) of each step; here it is of all steps together, to the last digit."""
    for steps in (1, 3, 10):
        placed = play_costs(SCHEDULES.read("pipedream").flow(4, 4, steps), 1.0, 2.0)
        assert bubble(placed, 4) == pytest.approx(3 / (4 * steps + 3))


# The run -------------------------------------------------------------------------------------------------------------

PLANS = [
    "pp=4 schedule=pipedream",
    "pp=2 schedule=pipedream:buffers=2",
    "dp=2 pp=2 schedule=pipedream recompute=full",
]
MORE = [
    "pp=2 schedule=pipedream", "pp=4 schedule=pipedream:buffers=2", "pp=3 schedule=pipedream:cut=1/1/2",
    "pp=2 tp=2 schedule=pipedream",
]  # fmt: skip


@pytest.mark.parametrize("plans", [PLANS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_it_is_one_device_with_the_versions_that_it_says(recipe, plans):
    for proof in prove(recipe, [Plan.parse(plan) for plan in plans], 4):
        assert proof.passed, (proof.plan, proof.first_divergence)
        assert proof.fidelity == "LOSSY" and "LOSSY" in proof.notes[0]
        assert max(proof.max_rel_err.values()) < 1e-11


@pytest.mark.parametrize(
    "micros", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_few_micro_batches_run_over_several_steps(recipe, micros):
    """One a step is the PipeDream of 2019: a stage's weights are as many updates old as stages come after it."""
    recipe = having(recipe, global_batch=micros)
    (proof,) = prove(recipe, [Plan.parse("pp=4 schedule=pipedream")], 5)
    assert proof.passed, proof.first_divergence


@pytest.mark.parametrize("name", BOTH)
def test_versions_of_each_micro_batch_and_what_is_held(recipe, name):
    """As each backward asserts: its forward's, and as the formula says; no more of them than that takes."""

    def body(run, feed, val):
        schedule, ages, most = run.player.schedule, [], 0
        for _ in train(run, feed, 6):
            most = max(most, len(run.player.stash.held))
            ages = run.player.log
        stage = run.mesh.at["pp"]
        assert [(micro, ahead) for micro, ahead, _ in ages] == [
            (k, schedule.version(stage, 4, 4, k)) for k in range(24)
        ]
        assert all(ahead == back for _, ahead, back in ages)
        return most, max(micro // 4 - ahead for micro, ahead, _ in ages)

    held, stale = zip(*on_ranks(recipe, f"pp=4 schedule={name}", body), strict=True)
    assert max(held) <= 2
    assert stale == ((1, 1, 1, 1) if "buffers" in name else (1, 1, 1, 0))


def test_evaluation_and_checkpoints_find_an_empty_pipeline(recipe, tmp_path):
    """They cost a flush, after which versions begin anew; a run that goes on from a checkpoint is the one that went
    on by itself, to the bit."""
    recipe = having(recipe, save_every=3, eval_every=3)
    plan = "pp=2 schedule=pipedream"

    def whole(run, feed, val):
        losses = []
        for report in train(run, feed, 6):
            losses.append(report.loss)
            if run.step == 3:
                assert run.player.empty and not run.player.stash.held
                losses.append(evaluate(run, [val.fetch(0, run.leaves)])[0])
                save(tmp_path, 3, pieces_of(run), {"step": 3}, rank=run.mesh.rank, world=2, token="t")
        return losses, weights(run)

    def resumed(run, feed, val):
        restore(run, tmp_path / "checkpoints" / "step-000003")
        return [report.loss for report in train(run, feed, 6)], weights(run)

    for (losses, wanted), (later, got) in zip(
        on_ranks(recipe, plan, whole), on_ranks(recipe, plan, resumed), strict=True
    ):
        assert losses[4:] == later and same(wanted, got)


@pytest.mark.parametrize("micros", [1, 4])
def test_who_is_stopped_finishes_what_is_in_flight(recipe, micros):
    recipe = having(recipe, global_batch=micros, steps=40)

    def stopped(run, feed, val):
        told = []
        for report in train(run, feed, 40, lambda: run.mesh.rank == 1 and run.step >= 2):
            told.append(report.loss)
            assert not report.stop or run.player.empty
        return run.step, told, weights(run)

    (steps, told, _), *others = (rank for rank in on_ranks(recipe, "pp=4 schedule=pipedream", stopped))
    assert 3 < steps < 16 and all(rank[:2] == (steps, told) for rank in others)


@pytest.mark.parametrize(("micros", "step"), [(4, 2), (1, 0)])
def test_a_number_that_is_none_ends_the_run_on_all_ranks(recipe, micros, step):
    """With one micro-batch a step, sums of later steps are under way when the first number comes."""
    recipe = having(recipe, global_batch=micros)

    def sick(run, feed, val):
        reports, begun, over = [], [], []
        start = run.mesh.replica.start_all_reduce

        def counted(x):
            begun.append(start(x))
            return SimpleNamespace(wait=lambda pending=begun[-1]: over.append(pending.wait()))

        run.mesh.replica.start_all_reduce = counted
        steps = train(run, feed, 6)
        while not reports or reports[-1]:
            if run.step == step and run.local.holds_loss:
                run.local.slots[-1].master.data.view(-1)[0] = math.nan
            reports.append(next(steps).finite)
        assert isinstance(run.player, FlowPlayer) and run.player.empty
        assert len(begun) == len(over), "no sum is left under way"
        evaluate(run, [val.fetch(0, run.leaves)])  # messages are those of this, none is left over
        return reports

    said = on_ranks(recipe, "pp=4 schedule=pipedream", sick)
    assert said[0][-1] is False and all(said[0][:-1]) and said == [said[0]] * 4


@pytest.mark.parametrize(
    "plan, more, match",
    [
        ("pp=2", {"clip": 1.0}, "norm of the whole model"),
        ("pp=2", {"guard": 5}, "guard"),
        ("pp=2", {"on_bad": "skip", "spike": 8.0}, "train.on_bad=skip and train.spike=8.0"),
        ("pp=2", {"quarantine": True}, "train.quarantine=true"),
        ("pp=2 shard=2", {}, "shard=2"),
        ("pp=2 dp=2 sync=canonical", {}, "one update for all"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(recipe, plan, more, match):
    with pytest.raises(UsageError, match=match):
        resolve(having(recipe, **more), f"{plan} schedule=pipedream")


def test_two_versions_need_a_micro_batch_for_each_rank(recipe):
    with pytest.raises(UsageError, match="as many micro-batches as ranks"):
        resolve(having(recipe, global_batch=2), "pp=4 schedule=pipedream:buffers=2")
