"""local_sgd, diloco: replicas with weights of their own."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.outer import Trained, distance, flat, gradients_of, mean, play, recipe_of
from unisono.comm.bucket import deal
from unisono_contrib.sync._rounds import Timing

pytestmark = pytest.mark.timeout(120)

STEPS = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def oracle(
    recipe, replicas: int, h: int, outer_lr: float = 1.0, momentum: float = 0.0
) -> list[dict[str, Tensor]]:
    """DiLoCo with plain SGD inside, written out: the weights of each replica after the last step."""
    gradients = gradients_of(recipe, replicas)
    outer = dict(gradients.start)
    velocity = {name: torch.zeros_like(x) for name, x in outer.items()}
    own = [dict(outer) for _ in range(replicas)]
    for step in range(recipe.train.steps):
        lr = recipe.train.rate()(step)
        for replica, weights in enumerate(own):
            for name, grad in gradients(step, replica, weights).items():
                weights[name] = weights[name] - lr * grad
        if (step + 1) % h == 0 or step + 1 == recipe.train.steps:
            merged = mean(own)
            for name, x in outer.items():
                delta = x - merged[name]
                velocity[name] = momentum * velocity[name] + delta
                outer[name] = x - outer_lr * (delta + momentum * velocity[name] if momentum else delta)
            own = [dict(outer) for _ in range(replicas)]
    return own


@pytest.mark.parametrize(
    ("sync", "h", "lr", "momentum"),
    [("local_sgd:2", 2, 1.0, 0.0), ("local_sgd:4", 4, 1.0, 0.0), ("diloco:h=3,outer_lr=0.7,outer_momentum=0.9", 3, 0.7, 0.9)],
)  # fmt: skip
def test_weights_are_those_of_the_algorithm_written_out(source, sync, h, lr, momentum) -> None:
    recipe = recipe_of(source, STEPS)
    wanted = oracle(recipe, 2, h, lr, momentum)
    for got, want in zip(play(recipe, f"dp=2 sync={sync}"), wanted, strict=True):
        assert distance(got.last, flat(want)) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sync", ["local_sgd:3", "diloco:h=2,fragments=2,delay=1"])
def test_the_same_samples_on_all_replicas_give_what_one_replica_gives(source, optimizer, sync) -> None:
    recipe = recipe_of(source, STEPS, optimizer=optimizer, clip=0.5)
    alone = recipe_of(source, STEPS, batch=4 // 2, optimizer=optimizer, clip=0.5)
    feeds_alike = play(recipe, f"dp=2 sync={sync}", twins=True)
    (one,) = _first_half(alone, recipe, "every_step" if sync.startswith("local") else sync)
    for got in feeds_alike:
        assert distance(got.last, one.last) < 1e-12


def _first_half(alone, recipe, sync: str) -> list[Trained]:
    """One replica, which has the first half of the samples of each step."""
    return play(alone, f"dp=1 sync={sync}", feed_of=recipe)


def test_with_one_replica_and_no_outer_optimiser_it_is_plain_training_bit_for_bit(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    (plain,), (diloco,) = (
        play(recipe, f"dp=1 sync={sync}") for sync in ("every_step", "diloco:h=3,outer_lr=1,outer_momentum=0")
    )
    for a, b in zip(plain.weights[2::3], diloco.weights[2::3], strict=True):
        assert distance(flat(b), flat(a)) < 1e-15


def test_a_round_of_one_step_is_lock_step_for_an_optimiser_that_is_linear(source) -> None:
    recipe = recipe_of(source, STEPS, momentum=0.9)
    plain, local = (play(recipe, f"dp=2 sync={sync}")[0] for sync in ("every_step", "local_sgd:1"))
    assert distance(local.last, plain.last) < 1e-12
    assert [r.loss for r in local.reports] == pytest.approx([r.loss for r in plain.reports], rel=1e-12)


def test_warm_up_is_lock_step_with_any_optimiser(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    plain, local = (play(recipe, f"dp=2 sync={sync}")[0] for sync in ("every_step", "local_sgd:h=2,warmup=4"))
    assert distance(flat(local.weights[3]), flat(plain.weights[3])) < 1e-12
    assert distance(local.last, plain.last) > 1e-9
    warm = play(recipe, "dp=2 sync=diloco:h=2,warmup=4,outer_lr=0.5", steps=3)[0]
    assert torch.equal(flat(warm.center), warm.last)  # so the first round begins from there


def test_no_size_of_a_bucket_changes_a_bit(source, monkeypatch) -> None:
    """torchft 0.2 loses tensors that do not fit."""
    recipe, plan = recipe_of(source, STEPS, optimizer="adamw"), "dp=2 sync=diloco:h=3"
    whole = play(recipe, plan)
    monkeypatch.setattr("unisono_contrib.sync._rounds.deal", partial(deal, cap_bytes=1024))
    for a, b in zip(whole, play(recipe, plan), strict=True):
        assert torch.equal(a.last, b.last)


def test_fragments_without_delay_are_diloco_where_all_are_due(source) -> None:
    """Three fragments are due in the last step, after which every replica has the outer weights."""
    recipe = recipe_of(source, 2, optimizer="adamw")
    whole, parts = (play(recipe, f"dp=2 sync=diloco:h=9,fragments={n}")[0] for n in (1, 3))
    assert torch.equal(whole.last, parts.last)


def test_a_merge_that_keeps_all_of_the_own_weights_never_mixes_them(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw")
    mixed = play(recipe, "dp=2 sync=diloco:h=3,delay=1,alpha=1", steps=STEPS - 1)
    apart = play(recipe, "dp=2 sync=local_sgd:1000", steps=STEPS - 1)
    for a, b in zip(mixed, apart, strict=True):
        assert torch.equal(a.last, b.last)


@pytest.mark.parametrize("inside", ["tp=2", "shard=2", "pp=2"])
def test_the_inside_of_a_replica_may_be_cut_in_any_way(source, inside: str) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    sync = "sync=diloco:h=2,outer_lr=0.7,outer_momentum=0.5"
    plain, cut = play(recipe, f"dp=2 {sync}"), play(recipe, f"dp=2 {inside} {sync}")
    for report, other in zip(plain[0].reports, cut[0].reports, strict=True):
        assert report.loss == pytest.approx(other.loss, rel=1e-12)
        assert report.norm == pytest.approx(other.norm, rel=1e-9)


def test_neighbours_in_lock_step_are_one_replica(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    groups = play(recipe, "dp=4 sync=diloco:h=2,inside=2")
    two = play(recipe, "dp=2 sync=diloco:h=2")
    for got, want in zip(groups, (two[0], two[0], two[1], two[1]), strict=True):
        assert distance(got.last, want.last) < 1e-12
        assert got.reports[-1].loss == pytest.approx(want.reports[-1].loss, rel=1e-12)


def test_nothing_crosses_dp_in_a_step_without_a_meeting(source) -> None:
    for got in play(recipe_of(source, STEPS), "dp=2 sync=local_sgd:3"):
        assert [n > 0 for n in got.sent] == [False, False, True] * 2


def test_a_fragment_sends_about_its_share_of_the_bytes(source) -> None:
    whole, parts = (play(recipe_of(source, 7), f"dp=2 sync=diloco:h=3,fragments={n}")[0].sent for n in (1, 3))
    assert max(parts[:-1]) < 1.15 * max(whole) / 3


def test_a_fragment_is_sent_in_its_own_turn() -> None:
    timing = Timing(h=4, count=2, steps=10)
    assert [[i for i in (0, 1) if timing.is_sent(i, step)] for step in range(10)] == [
        [], [1], [], [0], [], [1], [], [0], [], [0, 1],
    ]  # fmt: skip
    late = Timing(h=4, delay=2, steps=10)
    assert [step for step in range(10) if late.is_sent(0, step)] == [3, 9]
    assert not late.due(3, 4)
    assert late.due(3, 5)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 tp=2", "dp=2 shard=2", "dp=2 pp=2"])
@pytest.mark.parametrize(("sync", "at"), [("diloco:h=3", 3), ("diloco:h=3", 4), ("local_sgd:3", 5), ("diloco:h=2,fragments=2,delay=1", 4)])  # fmt: skip
def test_a_run_that_was_saved_goes_on_as_if_it_was_not(source, tmp_path, plan, sync, at) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw")
    plan = f"{plan} sync={sync}"
    whole = play(recipe, plan, save_at=at, folder=tmp_path / "run")
    again = play(recipe, plan, begin=next((tmp_path / "run" / "checkpoints").iterdir()))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a.last, b.last)
        assert [r.loss for r in a.reports[at:]] == [r.loss for r in b.reports]


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp=2 tp=2", "dp=2 shard=2"), ("dp=2 pp=2", "dp=2"), ("dp=2 shard=2", "dp=2 tp=2")],
)
def test_the_inside_may_change_between_rounds_and_within(source, tmp_path, before, after) -> None:
    recipe, sync = recipe_of(source, STEPS, optimizer="adamw"), "sync=diloco:h=3"
    whole = play(recipe, f"{before} {sync}", save_at=4, folder=tmp_path / "run")
    folder = next((tmp_path / "run" / "checkpoints").iterdir())
    again = play(recipe, f"{after} {sync}", begin=folder)
    assert [r.loss for r in again[0].reports] == pytest.approx(
        [r.loss for r in whole[0].reports[4:]], rel=1e-9
    )


def test_new_replicas_and_lock_step_go_on_from_the_outer_weights(source, tmp_path) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw")
    saved = play(recipe, "dp=2 sync=diloco:h=3", save_at=4, folder=tmp_path / "run", steps=4 + 1)
    folder = next((tmp_path / "run" / "checkpoints").iterdir())
    (alone,), four = (play(recipe, plan, begin=folder, steps=4) for plan in ("dp=1", "dp=4 sync=diloco:h=3"))
    names = saved[0].weights[0]
    alone_start, *starts = (flat({n: end.start[n] for n in names}) for end in (alone, *four))
    assert torch.equal(
        alone_start, flat(saved[0].weights[2])
    )  # after the first round all have the outer weights
    assert torch.equal(starts[2], alone_start) and torch.equal(starts[3], alone_start)
    for start, before in zip(starts, saved, strict=False):
        assert torch.equal(start, flat(before.weights[3]))  # those that stay keep their own


def test_a_step_that_is_not_of_numbers_on_one_replica_is_bad_at_the_next_meeting(source) -> None:
    recipe = recipe_of(source, STEPS)

    def spoil(run, step: int) -> None:
        if step == 0 and run.mesh.rank == 1:
            with torch.no_grad():
                run.local.slots[0].master.fill_(float("nan"))

    one, other = play(recipe, "dp=2 sync=local_sgd:3", watch=spoil, steps=3)
    assert [report.bad for report in one.reports[:2]] == ["", ""]
    assert one.reports[2].bad == other.reports[2].bad != ""
    assert torch.equal(one.last, flat(one.weights[1]))


def test_a_request_to_stop_is_heard_at_the_next_meeting(source) -> None:
    recipe = recipe_of(source, STEPS)
    ends = play(recipe, "dp=2 sync=local_sgd:3", stop=lambda rank, step: rank == 1 and step == 1, steps=4)
    assert [[report.stop for report in end.reports] for end in ends] == [[False, False, True, False]] * 2


def test_evaluation_is_of_the_outer_weights(source) -> None:
    from unisono.train.step.evaluate import central_weights

    seen = {}

    def look(run, step: int) -> None:
        if step == 3:
            own = flat({s.name: s.master.detach().clone() for s in run.local.slots})
            with central_weights(run):
                seen[run.mesh.rank] = own, flat({s.name: s.master.detach().clone() for s in run.local.slots})
            assert torch.equal(own, flat({s.name: s.master.detach() for s in run.local.slots}))

    play(recipe_of(source, STEPS), "dp=2 sync=diloco:h=3", watch=look, steps=4)
    assert torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_mean_that_has_arrived_at_one_replica_is_taken_over_by_a_new_one(source) -> None:
    """A replica was lost while others waited for a fragment: one of them has it, and the one in its place has not."""
    recipe = recipe_of(source, STEPS)

    def lose(run, step: int) -> None:
        fragment = run.sync.fragments[0]
        if fragment.sent != step or step != 2:
            return
        fragment.receive()
        if run.mesh.rank == 1:
            fragment.sent, fragment.arrived = -1, False
            for outer in fragment.outer.values():
                outer.grad = None
        run.sync.agree()

    plan = "dp=2 sync=diloco:h=3,delay=1"
    for got, calm in zip(play(recipe, plan, watch=lose), play(recipe, plan), strict=True):
        assert torch.equal(got.last, calm.last)
