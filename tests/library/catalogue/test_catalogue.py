"""Each loop of a user is equal to one process, refused or told; which of them is written with the loop."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.daily import is_today
from tests.library import catalogue
from tests.library.catalogue import (
    Loop,
    control,
    generative,
    losses,
    order,
    updates,
    verdict,
    vision,
    watched,
)
from tests.library.catalogue.playing import Row, rows
from tests.ranks import World

LOOPS = catalogue.all_loops()

pytestmark = pytest.mark.timeout(600)


def verdicts(threads: World, plan: str, loops: Sequence[Loop], **told: Any) -> dict[str, str]:
    (alone,) = threads(catalogue.on_ranks, 1, group=False, plan="dp=1", loops=loops)
    ranks = threads(catalogue.on_ranks, catalogue.PLANS[plan], group=False, plan=plan, loops=loops, **told)
    return {one.name: verdict(one, alone[one.name], [rank[one.name] for rank in ranks]) for one in loops}


# One or two of each kind.
WATCHED = (
    "gradients_by_autograd_grad",
    "projected_gradients",
    "clipped_by_sample",
    "stepped_as_gradients_arrive",
    "hooks_on_accumulated_gradients",
    "module_hook_that_normalises",
    "hooks_that_scale_and_look",
    "noise_of_a_numpy_generator",
    "data_set_with_generators_of_its_own",
    "advantages_by_their_spread",
    "advantages_by_the_spread_of_all",
    "attention_over_samples",
    "attention_within_samples",
    "padded_to_the_longest",
    "way_by_a_mean",
    "custom_function_over_the_samples",
    "custom_function_of_each_sample",
)

# What a plan can spoil that dp=2 does not: a rank without samples, replaced parameters, both axes at once.
QUICK = {
    "dp=2": [one for one in LOOPS if one not in vars(watched).values() or one.name in WATCHED],
    "dp=3": [
        order.look_ahead, updates.two_optimisers, losses.several_losses, vision.cnn_with_batchnorm,
        watched.gradients_added_in_place, watched.hooks_on_accumulated_gradients,
    ],
    "shard=2": [
        updates.two_optimisers, updates.an_optimiser_that_is_not_prepared, updates.clipping_a_list_made_before,
        updates.thawed_later, vision.ema_by_hand, generative.wgan_gp, order.look_ahead_that_copies,
        watched.gradients_by_autograd_grad, watched.gradients_by_torch_func, watched.hook_that_clamps_after_prepare,
        watched.hook_that_clamps, watched.drawn_anew_after_prepare, watched.weights_channels_last, watched.adafactor_steps,
        watched.weights_read_outside_the_forward, watched.a_weight_taken_before_prepare,
        watched.a_leftover_variable_of_a_loop, watched.stepped_as_gradients_arrive,
    ],
    "dp=2 shard=2": [updates.thawed_as_a_new_group, control.stateful_lstm],
}  # fmt: skip


@pytest.mark.parametrize("plan", QUICK)
def test_no_loop_is_different_in_silence(threads: World, plan: str) -> None:
    """Half of them each day."""
    quick = QUICK[plan]
    loops = [one for number, one in enumerate(quick) if is_today(number, min(2, len(quick)))]
    assert verdicts(threads, plan, loops) == {one.name: one.expected(plan) for one in loops}


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(QUICK))
def test_nor_is_any_of_all(threads: World, plan: str) -> None:
    assert verdicts(threads, plan, LOOPS) == {one.name: one.expected(plan) for one in LOOPS}


@pytest.mark.slow
@pytest.mark.parametrize("plan", QUICK)
def test_models_of_hugging_face(threads: World, plan: str) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: six loops of the catalogue are not played"
    )
    loops = [one for one in catalogue.all_loops(models_of_hugging_face=True) if one not in LOOPS]
    assert verdicts(threads, plan, loops) == {one.name: one.expected(plan) for one in loops}


def test_a_strict_job_raises_what_is_told_before_the_first_update(threads: World) -> None:
    told = [one for one in QUICK["dp=2"] if one.verdict.startswith("told")]
    expected = {one.name: f"refused {one.verdict.split()[1]}" for one in told}
    assert verdicts(threads, "dp=2", told, strict=True) == expected


HARD = catalogue.hard_loops()

# One or two of each kind.
SAMPLE = (
    "grads_by_autograd_grad", "torch_generator_in_loop", "advantages_normalised", "attention_over_batch",
    "rate_times_world", "pcgrad_after_backward",
)  # fmt: skip


def wrong(found: Sequence[Row]) -> list[str]:
    """Loops that are different in silence and not convicted by `unisono.prove`, and healthy ones that are not equal or
    that it accuses."""
    return [f"{row.loop.name} under {row.plan}: {row}, {row.proof}" for row in found if not row.right]


def test_what_is_still_silent_is_convicted() -> None:
    loops = [one for one in HARD if one.name in SAMPLE]
    assert len(loops) == len(SAMPLE)
    assert wrong([row for one in loops for row in rows(one, ["dp=2"])]) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("plan", catalogue.PLANS)
def test_of_all_the_hard_loops(plan: str) -> None:
    assert wrong([row for one in (*HARD, *LOOPS) for row in rows(one, [plan])]) == []


def test_names_are_unique_and_the_loops_many() -> None:
    names = [one.name for one in (*LOOPS, *HARD)]
    assert len({*names}) == len(names) and len(LOOPS) >= 40
    assert len(HARD) >= 128 and sum(one.verdict == "silent" for one in HARD) >= 80
