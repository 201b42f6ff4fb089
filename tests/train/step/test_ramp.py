"""A batch that follows the noise scale: decided alike by all ranks, kept in checkpoints, in the order of samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.small import recipe, started
from unisono.config import DataConfig, ModelConfig, Recipe, resolve
from unisono.spec.errors import ConfigProblems
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import fetch, next_step, train_step
from unisono_contrib.config.sections.noise_scale import NoiseScaleConfig
from unisono_contrib.config.sections.ramp import BatchSizes, RampConfig
from unisono_contrib.train.step.ramp import KnownSizes

ALONE: Any = SimpleNamespace(rank=0, world=1, local_rank=0, backend="gloo")
KEYS: dict[str, Any] = {"by": "noise_scale", "first": 2, "every": 1}


def measuring(folder: Path, keys: dict[str, Any] = KEYS, **train: Any) -> Recipe:
    train = {"global_batch": 16, "micro_batch": 1, "steps": 12, **train}
    model, data = ModelConfig(kind="mlp"), DataConfig(source="digits")
    sections = {
        "model": model,
        "data": data,
        "ramp": RampConfig(**keys),
        "noise_scale": NoiseScaleConfig(smoothing=0.5),
    }
    return recipe(folder, **train).model_copy(update=sections)


def played(ctx: Any, folder: str, plan: str, steps: int = 6, resumed: bool = False) -> Any:
    """(loss, samples, position of the first one, rate) of each step on rank 0; afterwards saved, or before resumed."""
    Path(folder).mkdir(exist_ok=True)
    run, feed, _ = started(ctx, measuring(Path(folder)), plan)
    if resumed:
        restore(run, Path(folder) / "checkpoints" / "step-000003")
    seen = []
    while len(seen) < steps:
        first = int(fetch(run, feed)[0].samples[0])
        report = next_step(run, feed)
        seen.append((report.loss, run.of_leaves, first, report.says["noise_scale"]))
    if not resumed:
        boxes, who = [*pieces_of(run), *kept_of(run)], {"rank": ctx.rank, "world": ctx.world}
        save(Path(folder), steps, boxes, {"step": steps}, token="ramp", **who)
    return seen


sizes = st.builds(
    lambda first, growth, stages: BatchSizes(first, first + growth * stages, growth),
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 9),
)  # fmt: skip
scales = st.one_of(st.none(), st.just(float("inf")), st.floats(0, 200))


@given(sizes, st.integers(0, 9), scales)
def test_a_size_never_shrinks_and_is_one_of_the_sizes(
    batch: BatchSizes, stage: int, scale: float | None
) -> None:
    size = batch.first + batch.growth * min(stage, batch.stages)
    after = batch.after(size, scale)
    assert size <= after <= batch.last and (after - batch.first) % batch.growth == 0
    assert after <= max(2 * size, size + batch.growth)
    assert after == size or scale is None or after <= scale + 1 / 1024


@given(sizes, st.integers(0, 9), st.floats(0, 200))
def test_a_larger_noise_scale_makes_no_smaller_batch(batch: BatchSizes, stage: int, scale: float) -> None:
    size = batch.first + batch.growth * min(stage, batch.stages)
    assert batch.after(size, scale) <= batch.after(size, scale + 3.0) <= batch.after(size, None)


def test_rounding_at_a_size_itself_decides_nothing() -> None:
    batch = BatchSizes(4, 16, 4)
    assert batch.after(4, 8.0 - 1e-9) == batch.after(4, 8.0 + 1e-9) == 8
    assert batch.after(4, 7.9) == 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6))
def test_a_step_begins_where_the_one_before_ends(growths: list[tuple[int, int]]) -> None:
    """growths: (steps of a size, samples by which the next is larger)."""
    known, step, begin = KnownSizes.first(2), 0, 0
    for steps, more in growths:
        assert known.before(step) == begin
        begin += steps * known.samples(step)
        step += steps
        known.grow(step, known.samples(step) + more)
    assert KnownSizes.among(known.kept, 1).before(step) == begin
    if step:
        with pytest.raises(ValueError, match="lies before"):
            known.samples(step - 1)


@pytest.mark.timeout(90)
def test_all_plans_decide_alike_and_read_on(threads: Any, tmp_path: Path) -> None:
    (alone,) = threads(played, 1, group=False, folder=str(tmp_path), plan="dp=1")
    batches = [samples for _, samples, _, _ in alone]
    assert batches == sorted(batches) and batches[0] == 2 < batches[-1]
    assert [first for _, _, first, _ in alone] == [sum(batches[:step]) for step in range(6)]
    for end in threads(played, 2, folder=str(tmp_path), plan="dp=2"):
        assert [step[1] for step in end] == batches
        assert [step[0] for step in end] == pytest.approx([step[0] for step in alone], rel=1e-10)


@pytest.mark.timeout(90)
def test_a_run_goes_on_with_its_sizes_at_another_world(threads: Any, tmp_path: Path) -> None:
    (whole,) = threads(played, 1, group=False, folder=str(tmp_path / "a"), plan="dp=1", steps=6)
    threads(played, 2, folder=str(tmp_path / "b"), plan="dp=2", steps=3)
    (rest,) = threads(played, 1, group=False, folder=str(tmp_path / "b"), plan="dp=1", steps=3, resumed=True)
    assert [step[1:3] for step in rest] == [step[1:3] for step in whole[3:]]
    assert [step[0] for step in rest] == pytest.approx([step[0] for step in whole[3:]], rel=1e-10)
    assert whole[3][1] > 2, "it had grown before it was saved"


@pytest.mark.parametrize("by", ["steps", "noise_scale"])
def test_the_rate_of_a_step_is_that_of_its_own_batch(by: str, tmp_path: Path) -> None:
    keys = {**KEYS, "scale_lr": True} if by == "noise_scale" else {"first": 2, "steps": 3, "scale_lr": True}
    whole = measuring(
        tmp_path, keys, lr_scaling="sqrt", lr_base_batch=4, warmup_steps=0, lr_schedule="constant"
    )
    run, feed, _ = started(ALONE, whole, "dp=1")
    sizes = set[int]()
    for _ in range(6):
        report = next_step(run, feed)
        sizes.add(run.of_leaves)
        assert report.lr == pytest.approx(1e-2 * (run.of_leaves / 4) ** 0.5)
    assert len(sizes) > 1


def test_a_schedule_may_count_samples(tmp_path: Path) -> None:
    """12 steps of 4, 8, 12 and from the fourth on 16 samples: 168. Of each, the rate where as many were read."""
    keys = {"first": 4, "steps": 3, "schedule": "samples"}
    whole = measuring(tmp_path, keys, warmup_steps=0, lr_schedule="linear")
    run, feed, _ = started(ALONE, whole, "dp=1")
    plain = whole.train.rate()
    read = 0
    for _ in range(6):
        report = next_step(run, feed)
        assert report.lr == plain(12 * read // 168)
        read += run.of_leaves
    assert read == 4 + 8 + 12 + 3 * 16


@pytest.mark.parametrize(
    ("code", "keys", "plan", "train"),
    [
        ("C06", {**KEYS, "steps": 3}, "dp=1", {}),
        ("C06", {"first": 2, "every": 3}, "dp=1", {}),
        ("C06", {**KEYS, "scale_lr": True}, "dp=1", {}),
        ("C06", {**KEYS, "schedule": "samples"}, "dp=1", {}),
        ("C06", {**KEYS, "first": 1}, "dp=1", {}),
        ("C06", KEYS, "dp=1", {"optimizer": "adascale"}),
        ("C06", {**KEYS, "first": 3}, "dp=1", {}),
        ("P44", KEYS, "dp=2 codec=int8", {}),
        ("P44", KEYS, "dp=1", {"guard": 5}),
        ("P43", KEYS, "dp=2 sync=period:steps=2", {}),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, code: str, keys: dict[str, Any], plan: str, train: dict[str, Any]
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(measuring(tmp_path, keys, **train), plan)
    assert code in {problem.code for problem in caught.value.problems}


def test_batches_that_do_not_follow_the_run_are_noticed(tmp_path: Path) -> None:
    """Such as those of a feed that does not have the run's numbers."""
    run, feed, _ = started(ALONE, measuring(tmp_path), "dp=1")
    next_step(run, feed)
    run.update.keeps["ramp_size"].fill_(6.0)
    leaves = feed.fetch(1, range(6))
    run.update.keeps["ramp_size"].fill_(8.0)
    with pytest.raises(RuntimeError, match="decided on 8"):
        train_step(run, leaves[:2])
