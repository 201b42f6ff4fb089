"""ssp, async, quorum: weights and optimiser lie with servers."""

from pathlib import Path

import pytest

from tests.sync.outer import distance, flat, gradients_of, mean, play, recipe_of
from unisono.plan import Plan
from unisono_contrib.sync._servers.worker import ServerSync

pytestmark = pytest.mark.timeout(120)

STEPS = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sync", ["ssp:s=0", "quorum:k=2"])
def test_waiting_for_all_is_lock_step_with_any_optimiser(source, sync, optimizer) -> None:
    recipe = recipe_of(source, STEPS, optimizer=optimizer, clip=0.5, weight_decay=0.1)
    plain, served = (play(recipe, f"dp=2 sync={each}") for each in ("every_step", sync))
    for a, b in zip(plain, served, strict=True):
        assert distance(flat(b.center), flat(a.weights[-1])) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sync", ["ssp:s=3", "async", "async:rate=aware", "async:dc=0.0", "quorum:k=1"])
def test_one_replica_is_sequential_training(source, sync, optimizer) -> None:
    recipe = recipe_of(source, STEPS, optimizer=optimizer, clip=0.5)
    (plain,), (served,) = (play(recipe, f"dp=1 sync={each}") for each in ("every_step", sync))
    assert distance(flat(served.center), flat(plain.weights[-1])) < 1e-12


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("inside", ["tp=2", "shard=2", "pp=2"])
def test_the_inside_of_a_replica_may_be_cut_in_any_way(source, inside, servers) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    served = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"servers": servers})})
    plain, cut = play(recipe, "dp=2"), play(served, f"dp=2 {inside} sync=ssp:0")
    assert cut[0].reports[-1].norm > 0.0
    assert cut[0].reports[-1].loss == pytest.approx(plain[0].reports[-1].loss, rel=1e-10)


@pytest.mark.parametrize("sync", ["ssp:s=0", "quorum:k=2", "ssp:s=2", "async"])
def test_a_run_that_was_saved_goes_on(source, tmp_path, sync) -> None:
    recipe, plan = recipe_of(source, STEPS, optimizer="adamw"), f"dp=2 sync={sync}"
    whole = play(recipe, plan, save_at=3, folder=tmp_path / "run")
    folder = next((tmp_path / "run" / "checkpoints").iterdir())
    again = play(recipe, plan, begin=folder)
    assert len(again[0].reports) == STEPS - 3
    if sync in ("ssp:s=0", "quorum:k=2"):
        assert distance(flat(again[0].center), flat(whole[0].center)) < 1e-12
        other = play(recipe, "dp=2", begin=folder)
        assert distance(other[0].last, flat(whole[0].center)) < 1e-12


def test_servers_are_refused_where_they_mean_nothing(source) -> None:
    recipe = recipe_of(source, STEPS)
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"servers": 3})})
    plans = ("dp=4 sync=every_step", "dp=2 sync=async", "dp=2 sync=quorum:k=3", "dp=2 sync=ssp codec=int8")
    for plan in plans:
        assert {problem.code for problem in Plan.parse(f"{plan} precision=fp64").check(recipe)} == {"P16"}
    assert not Plan.parse("dp=4 sync=ssp:s=2 precision=fp64").check(recipe)


def test_staleness_is_in_the_metrics_to_the_unit(source) -> None:
    for sync, most in (("ssp:s=0", 0), ("ssp:s=2", 2)):
        ends = play(recipe_of(source, STEPS), f"dp=2 sync={sync}")
        counts = [line["staleness_counts"] for line in ends[0].metrics]
        assert max(len(line) for line in counts) <= most + 1
        assert STEPS <= sum(map(sum, counts)) <= 2 * STEPS
        assert all(0.0 <= line["idle_share"] <= 1.0 for end in ends for line in end.metrics)


def test_a_request_to_stop_is_heard_by_all_in_the_same_step(source) -> None:
    for sync in ("ssp:s=2", "async", "quorum:k=1"):
        ends = play(
            recipe_of(source, STEPS), f"dp=2 sync={sync}", stop=lambda rank, step: rank == 1 and step == 0
        )
        first = [next(r.step for r in end.reports if r.stop) for end in ends]
        assert first[0] == first[1] < STEPS


def test_a_late_gradient_is_kept_for_the_next_one(source) -> None:
    ends = play(recipe_of(source, STEPS), "dp=2 sync=quorum:k=1,late=keep")
    assert {name.endswith("/late") for end in ends for name in end.state} == {True}


def test_stale_gradients_make_the_updates_of_the_algorithm_written_out(source, monkeypatch) -> None:
    """ssp: update c is the mean of the gradients of step c, each computed with the weights that its replica had read."""
    recipe, read = recipe_of(source, 8, momentum=0.9), {}
    hear = ServerSync._hear

    def noted(self, op):
        messages = hear(self, op)
        if op == "read":
            read[self.group.index, self._step] = messages[0][0]["version"]
        return messages

    monkeypatch.setattr(ServerSync, "_hear", noted)
    ends = play(recipe, "dp=2 sync=ssp:s=3")
    assert any(step > version for (_, step), version in read.items())  # else nothing was stale
    gradients = gradients_of(recipe, 2)
    versions, velocity = [dict(gradients.start)], dict.fromkeys(gradients.start, 0.0)
    for step in range(8):
        parts = [gradients(step, replica, versions[read[replica, step]]) for replica in (0, 1)]
        grads = mean(parts)
        velocity = {name: 0.9 * velocity[name] + grads[name] for name in grads}
        rate = recipe.train.rate()(step)
        versions.append({name: versions[-1][name] - rate * velocity[name] for name in grads})
    for end in ends:
        assert distance(flat({n: end.center[n] for n in versions[-1]}), flat(versions[-1])) < 1e-12
