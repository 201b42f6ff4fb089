"""plan=auto: what is chosen is the best that the planner knows, the keys beside it are kept, and it says why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.cores import MACHINE
from unisono import config
from unisono.cli import main
from unisono.measure.calibrate import as_toml
from unisono.plan import Plan
from unisono.planner import simulate
from unisono.planner.from_recipe import request_of
from unisono.planner.search import candidates, search
from unisono.planner.space import space_of, space_on
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.verbs._sizes import model_of
from unisono.verbs.train import planning

FLAGS = [("model.kind", "gpt"), ("train.global_batch", "16"), ("model.vocab", "256")]


@pytest.fixture
def measured(tmp_path: Path) -> dict[str, str]:
    return calibrated(tmp_path)


def calibrated(cache: Path) -> dict[str, str]:
    """The environment of a user whose machine was measured."""
    path = cache / "unisono" / "cluster.toml"
    path.parent.mkdir()
    path.write_text(as_toml(MACHINE, "a test"))
    return {"XDG_CACHE_HOME": str(cache)}


def loaded(plan: str, *more: tuple[str, str]) -> config.Loaded:
    return config.load(None, [*FLAGS, ("plan", plan), *more])


@pytest.mark.parametrize(
    ("keys", "ranks"), [("auto", 2), ("auto", 4), ("auto tp=2", 4), ("auto pp=2 zero=1", 4)]
)
def test_nothing_that_was_searched_is_faster(measured, keys, ranks):
    got, said = planning.choose(loaded(keys), ranks, measured)
    assert got.plan.world == ranks and not got.plan.auto
    for key in ("tp", "pp"):
        if f"{key}=" in keys:
            assert getattr(got.plan, key) == 2
    assert config.resolve(got.recipe, got.plan, ranks).plan.world == ranks
    assert str(got.plan) in said[0] and "right within" in said[0]
    file = str(Path(measured["XDG_CACHE_HOME"], "unisono", "cluster.toml"))

    def step(plan: str) -> float:
        return simulate.simulate(request_of(loaded(plan), model_of(loaded(plan), {}), file, None)).price.step

    if ranks == 2 and keys == "auto":
        assert all(
            step(str(got.plan)) <= step(other) for other in ("dp=2", "tp=2", "shard=2", "pp=2 micros=4")
        )


def test_the_quickest_of_those_played_is_chosen_one_of_each_mesh(measured):
    """Whatever the prices say: here the plan that is played last turns out to be the quickest."""
    seen: list[Plan] = []

    def play(_, answers):
        seen.extend(one.request.plan for one in answers)
        return [float(len(answers) - place) for place in range(len(answers))]

    got, said = planning.choose(loaded("auto"), 4, measured, play)
    meshes = [(plan.dp, plan.shard, plan.cp, plan.tp, plan.pp) for plan in seen]
    assert len(meshes) == len(set(meshes)) == planning.PLAYED
    assert str(got.plan) == str(seen[-1]) and str(seen[-1]) in said[0] and "played here" in said[0]
    assert all(str(plan) in line for plan, line in zip(seen[:-1], said[1:], strict=True))


def test_without_a_measurement_it_says_how_to_get_one(tmp_path):
    with pytest.raises(UsageError) as caught:
        planning.choose(loaded("auto"), 2, {"XDG_CACHE_HOME": str(tmp_path)})
    assert "unisono calibrate" in caught.value.fix


def test_only_train_chooses():
    got = loaded("auto tp=2")
    with pytest.raises(ConfigProblems) as caught:
        config.resolve(got.recipe, got.plan)
    assert "unisono train" in caught.value.problems[0].what


def test_a_dry_run_shows_what_would_be_trained(measured, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", measured["XDG_CACHE_HOME"])
    assert main(["train", "--demo", "--plan", "auto", "--launch.ranks", "2", "--dry-run"]) == 0
    out = capsys.readouterr()
    assert "plan auto" in out.err
    chosen = next(line for line in out.err.splitlines() if line.startswith("plan auto")).split(":")[0]
    assert Plan.parse(chosen.removeprefix("plan auto").strip()).world == 2


def test_keys_that_say_nothing_of_precision_keep_the_recipes(tmp_path, capsys):
    recipe = tmp_path / "half.toml"
    recipe.write_text(
        'plan = "precision=bf16"\n[model]\nkind = "gpt"\nvocab = 256\n[train]\nglobal_batch = 64\n'
    )
    assert main(["plan", str(recipe), "--cluster", "dgx-a100", "--plan", "tp=2", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans and all("precision=bf16" in one["plan"] and "tp=2" in one["plan"] for one in plans)


EXAMPLES = Path(__file__).parents[2] / "examples"
# Another verb plays federated recipes, on one device.
RECIPES = [
    *(str(path) for path in sorted(EXAMPLES.glob("*.toml")) if "[federated]" not in path.read_text()),
    f"{EXAMPLES}/recipe.py:tiny",
]


BATCHES = ("12", "36", "100")
# Each recipe with its own batch and with one other, each batch with some of the recipes; slowly, all with all.
PAIRS = [
    pytest.param(recipe, batch, marks=() if batch in (None, BATCHES[i % 3]) else pytest.mark.slow)
    for i, recipe in enumerate(RECIPES)
    for batch in (None, *BATCHES)
    if batch is None or not recipe.endswith("grpo.toml")  # whose batch is a number of whole groups
]


@pytest.mark.parametrize(("recipe", "batch"), PAIRS, ids=lambda text: Path(text).name if text else "own")
def test_the_choice_is_priced_no_higher_than_the_recipes_own_plan_and_trains_default(recipe, batch, measured):
    flags = [("train.dtype", "float32"), *([("train.global_batch", batch)] if batch else [])]
    if "vocab" in type(config.load(recipe, flags).recipe.model).model_fields:
        flags.append(("model.vocab", "256"))
    file = str(Path(measured["XDG_CACHE_HOME"], "unisono", "cluster.toml"))

    def step(plan: str) -> float:
        got = config.load(recipe, [*flags, ("plan", plan)])
        return simulate.simulate(request_of(got, model_of(got, {}), file, None)).price.step

    own, compared = config.load(recipe, flags), 0
    for ranks in (2, 4):
        chosen = planning.choose(replace(own, plan=Plan.parse("auto")), ranks, measured)[0].plan
        for plan in {own.plan, Plan(dp=ranks)}:
            if plan.world == ranks and not plan.check(own.recipe):
                assert step(str(chosen)) <= (1 + 1e-12) * step(str(plan)), f"{chosen} beside {plan}"
                compared += 1
    assert compared > 1


def test_a_plan_of_ones_own_is_looked_at_though_no_search_would_list_it():
    cut = "1f1b:cut=4/1/1/2"
    got = loaded(f"dp=1 pp=4 schedule={cut} precision=bf16", ("model.n_layer", "8"))
    space = space_of(got, model_of(got, {}), None, "dgx-a100", None)
    alone = replace(space, cluster=replace(space.cluster, devices=4))
    assert all(plan.schedule != cut for plan, _ in candidates(alone))
    here = space_on(got, space.model, Plan(), alone.cluster, space.stack)
    assert cut in {plan.schedule for plan, _ in here.besides(4)}
    every = search(here, top=10_000).best
    assert cut in {one.request.plan.schedule for one in every}
