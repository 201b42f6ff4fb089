"""Ranges of blocks: one word that round-trips, every mistake told with its remedy, and what each block comes to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.plan.blocks import Away, BlockOptions, Range, options_of, ranges_of, text_of
from unisono.plan.fields import ALIKE
from unisono.spec.errors import ConfigProblems, UsageError

VALUES = {
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "params:to=disk", "optimizer+activations"),
    "zero": ("1", "2", "3"),
    "tp": ("1",),
}
said = st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 3), min_size=1).map(
    lambda picked: tuple((key, VALUES[key][n % len(VALUES[key])]) for key, n in picked.items())
)


@st.composite
def some_ranges(draw: st.DrawFn) -> tuple[Range, ...]:
    ends = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=8)))
    return tuple(Range(a, b - 1, draw(said)) for a, b in zip(ends[::2], ends[1::2], strict=False))


@given(some_ranges())
def test_a_word_and_its_ranges_are_the_same(ranges: tuple[Range, ...]) -> None:
    text = text_of(ranges)
    assert ranges_of(text) == ranges
    plan = Plan.parse(f"tp=2 blocks={text}")
    assert Plan.parse(str(plan)) == plan and plan.blocks == text


@given(some_ranges(), st.integers(1, 4))
def test_each_block_has_what_its_range_says_and_the_rest_what_the_plan_says(
    ranges: tuple[Range, ...], stages: int
) -> None:
    plan = Plan(tp=2, recompute="full", offload="optimizer", zero=2, blocks=text_of(ranges))
    cuts = tuple(range(n * 12, n * 12 + 12) for n in range(stages + 3))
    each = options_of(plan, cuts)
    for number, got in enumerate(each):
        one = next((r for r in ranges if r.first <= number <= r.last), Range(0, 0, ()))
        assert got.recompute == (one.says("recompute") or "full")
        assert got.zero == int(one.says("zero") or 2)
        assert got.whole == (one.says("tp") == "1")
        assert got.away.params == ("params" in (one.says("offload") or ""))


def test_recompute_auto_makes_ranges_of_each_stage() -> None:
    plan = Plan(recompute="auto:full=1,selective=1", blocks="5:recompute=none,offload=params:to=disk")
    modes = [one.recompute for one in options_of(plan, (range(3), range(3, 6)))]
    assert modes == ["full", "selective", "none", "full", "selective", "none"]
    away = Away(optimizer=True, params=True, on_disk=True)
    assert options_of(plan, (range(6),))[5] == BlockOptions("none", away, 3)


@pytest.mark.parametrize(
    ("value", "codes"),
    [
        ("", {"P05"}), ("full", {"P05"}), ("0-2", {"P05"}), ("0-2:", {"P05"}), ("a-b:zero=1", {"P05"}),
        ("2-0:zero=1", {"P05"}), ("0-3:zero=1;3:zero=2", {"P05"}), ("0:zero=4", {"P03"}), ("0:tp=2", {"P03"}),
        ("0:recompute=auto", {"P04"}), ("0:offload=weights", {"P04"}), ("0:codec=int8", {"P05"}),
        ("0:zero=1,zero=2", {"P02"}), ("0:zero=4;1:tp=3;;x", {"P03", "P05"}), ("0:offload=params:to=tape", {"P05"}),
    ],
)  # fmt: skip
def test_mistakes_in_the_word_are_told_all_at_once(value: str, codes: set[str]) -> None:
    with pytest.raises(ConfigProblems) as caught:
        Plan.parse(f"tp=2 blocks={value}")
    assert {p.code for p in caught.value.problems} == codes
    assert all(p.fix and p.where for p in caught.value.problems)


@pytest.mark.parametrize(
    ("plan", "codes"),
    [
        ("blocks=0-3:recompute=full", set()),
        ("blocks=0-4:recompute=full", {"P25"}),
        ("blocks=0:zero=1", {"P16"}),
        ("blocks=0:tp=1", {"P16"}),
        ("tp=2x2 blocks=0:tp=1", {"P12"}),
        ("tp=3 blocks=0:tp=1", {"P12"}),
        ("dp=2 tp=2 sync=canonical:shards=2 blocks=0:tp=1", {"P12"}),
        ("shard=2 blocks=0:offload=params", {"P22"}),
        ("blocks=0:offload=params;1:offload=params:to=disk", {"P22"}),
        ("precision=bf16:params blocks=0:offload=params", {"P22"}),
        ("tp=2 blocks=0:zero=1,tp=1;7:recompute=none", {"P16", "P25"}),
    ],
)
def test_what_does_not_fit_the_model_or_the_other_keys(plan: str, codes: set[str]) -> None:
    model = ModelConfig(kind="gpt", n_layer=4, n_head=4, d_model=16, context=16)
    problems = Plan.parse(plan).check(Recipe(model=model, train=TrainConfig(global_batch=8, micro_batch=4)))
    assert {p.code for p in problems if p.code != "P11"} == codes
    assert all(p.fix and p.where for p in problems)


def test_of_other_models_some_blocks_cannot_be_whole_or_selective() -> None:
    recipe = Recipe(model=ModelConfig(kind="mlp", hidden=(8, 8, 8)), train=TrainConfig(global_batch=8))
    codes = {p.code for p in Plan.parse("tp=2 blocks=0:tp=1;1:recompute=selective").check(recipe)}
    assert codes == {"P12", "P17"}


def test_blocks_of_a_model_that_knows_its_depth_alone_are_counted_when_it_is_there() -> None:
    with pytest.raises(UsageError, match="names block 9, and the model has 9"):
        options_of(Plan.parse("blocks=8-9:recompute=full"), (range(9),))


def test_no_range_is_no_word() -> None:
    assert text_of(()) == ALIKE == Plan().blocks and "blocks" not in str(Plan())
