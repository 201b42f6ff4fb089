"""A plan is a value and, equally, its text; what the contract does not know is refused, all of it at once."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan import Plan, choice
from unisono.plan.grammar import KEYS, NAMED, SIZES, known, member
from unisono.spec.errors import ConfigProblems, UsageError

NEEDED = {"local_sgd": ":h=8", "diloco": ":h=500", "quorum": ":k=3", "ssp": ":s=2", "powersgd": ":r=4"}
sizes = st.integers(1, 64)


def named(key: str) -> st.SearchStrategy[str]:
    words = [name + NEEDED.get(name, "") for name in known(key)]
    if key == "codec":
        words += ["topk:ratio=0.01+ef", "topk:ratio=1e-3+ef+mc", "cast:bf16", "powersgd:r=2+ef", "sign+ef"]
    if key == "schedule":
        words += ["interleaved:v=2"]
    return st.sampled_from(words)


plans = st.builds(
    Plan,
    dp=st.one_of(sizes, st.just(-1)),
    zero=st.integers(1, 3),
    micros=st.none() | sizes,
    **dict.fromkeys(("shard", "pp", "tp", "cp", "ep"), sizes),
    **{key: named(key) for key in NAMED},
)


@given(plans)
def test_text_round_trips(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@given(plans, st.randoms())
def test_order_and_space_of_words_mean_nothing(plan: Plan, random) -> None:
    words = str(plan).split()
    random.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan


@given(plans)
def test_world_is_the_product_of_the_axes(plan: Plan) -> None:
    filled = plan.fill(plan.inner * 3)
    assert filled.world == filled.dp * plan.shard * plan.pp * plan.cp * plan.tp
    assert filled.replicas == filled.dp * plan.shard
    assert filled.dp == (3 if plan.dp == -1 else plan.dp)


@given(st.text())
def test_any_text_is_a_plan_or_a_clear_refusal(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except ConfigProblems as error:
        assert error.problems
        assert all(p.what and p.where and p.fix for p in error.problems)
    else:
        assert Plan.parse(str(plan)) == plan


def test_the_empty_plan_is_one_device() -> None:
    assert Plan.parse("") == Plan()
    assert str(Plan()) == "dp=1"
    assert Plan().world == 1


def test_the_contracts_example_is_read() -> None:
    text = (
        "dp=2 shard=2 zero=3 pp=2 tp=2 cp=1 ep=1 schedule=1f1b micros=8 sync=every_step "
        "codec=topk:ratio=0.01+ef precision=bf16 recompute=selective"
    )
    plan = Plan.parse(text)
    assert plan.world == 16
    assert plan.codec == "topk:ratio=0.01+ef"
    assert plan.said >= {"zero", "sync", "precision"}


def test_a_value_comes_apart() -> None:
    got = choice("topk:ratio=1e-3+ef+mc")
    assert (got.name, dict(got.options), got.marks) == ("topk", {"ratio": "1e-3"}, ("ef", "mc"))
    assert dict(choice("cast:bf16").options) == {"": "bf16"}


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("dpp=2", "P01", "did you mean dp?"),
        ("recompte=full", "P01", "did you mean recompute?"),
        ("dp=2 dp=3", "P02", "twice"),
        ("tp=two", "P03", "not a whole number"),
        ("tp=2.0", "P03", "not a whole number"),
        ("pp=-2", "P03", "out of range"),
        ("shard=0", "P03", "out of range"),
        ("dp=-2", "P03", "out of range"),
        ("zero=4", "P03", "none of 1, 2, 3"),
        ("zero=0", "P03", "none of 1, 2, 3"),
        ("schedule=1f2b", "P04", "did you mean 1f1b?"),
        ("precision=fp8", "P04", "not known"),
        ("dp", "P05", "key=value"),
        ("dp=", "P05", "key=value"),
        ("dp=２", "P03", "digits that look like 0 to 9"),
        ("codec=topk:ratio=2", "P05", "less than or equal to 1"),
        ("codec=topk:ratio=0.1+xx", "P05", "+xx"),
        ("precision=fp32:x=1", "P05", "no such options"),
        ("zero=3:wire=int4", "P05", "other options"),
        ("zero=3:", "P05", "other options"),
        ("zero=4:wire=int8", "P03", "none of 1, 2, 3"),
        ("precision=bf16:params,stochastic", "P05", "other options"),
        ("precision=fp16:scale=3", "P05", "other options"),
        ("schedule=interleaved:v=0", "P05", "v: input should be greater"),
        ("schedule=interleaved:w=2", "P05", "takes no option w"),
        ("schedule=1f1b:ctu=1/1", "P05", "did you mean cut?"),
        ("codec=plain:ratio=0.1", "P05", "takes no option ratio"),
    ],
)
def test_each_mistake_has_its_code_and_words(text: str, code: str, words: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        Plan.parse(text)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert words in problem.what
    assert problem.fix


def test_a_path_with_a_blank_is_told_how_to_do_without() -> None:
    with pytest.raises(ConfigProblems) as caught:
        Plan.parse("dp=2 sync=my dir/mine.py:Own")
    assert any("dir/mine.py:Own" in p.what and "ln -s" in p.fix for p in caught.value.problems)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigProblems) as caught:
        Plan.parse("dp=x dpp=3 pp=0 dp=2 schedule=no lonely")
    assert {p.code for p in caught.value.problems} == {"P01", "P02", "P03", "P04", "P05"}
    assert caught.value.exit == 2


def test_a_plan_made_in_python_is_held_to_the_same_rules() -> None:
    with pytest.raises(ConfigProblems):
        Plan(dp=0)
    with pytest.raises(ConfigProblems):
        Plan(schedule="no")
    with pytest.raises(ConfigProblems):
        Plan(micros="4")  # type: ignore[arg-type]


def test_filling_needs_a_world_that_fits() -> None:
    assert Plan(dp=-1, tp=2).fill(8).dp == 4
    assert Plan(dp=2).fill(8).dp == 2
    with pytest.raises(UsageError):
        Plan(dp=-1, tp=2).fill(7)
    with pytest.raises(UsageError):
        _ = Plan(dp=-1).world


@pytest.mark.parametrize("key", NAMED)
def test_every_value_of_the_contract_is_played(key: str) -> None:
    for name in known(key):
        plan = dataclasses.replace(Plan(dp=2), **{key: name + NEEDED.get(name, "")})
        assert not {p.code for p in plan.check()}, name


@pytest.mark.parametrize("text", ["codec=sign", "sync=gossip", "sync=local_sgd:h=4"])
def test_what_meets_on_dp_needs_a_dp(text: str) -> None:
    assert "P16" in {p.code for p in Plan.parse(text).check()}
    assert "P16" not in {p.code for p in Plan.parse(f"dp=2 {text}").check()}


def test_every_key_has_a_kind() -> None:
    assert set(KEYS) == set(SIZES) | set(NAMED) | {"blocks"}
    assert set(KEYS) == {f.name for f in dataclasses.fields(Plan)} - {"said", "options"}


OWN = '''
from pydantic import Field
from unisono.codecs import CODECS
from unisono.spec.fidelity import Fidelity
from unisono.codecs.plain import Plain
from unisono.sync.every_step import EveryStep

class Patient(EveryStep):
    """Waits."""
    name = "patient"
    alone = False
    h: int = Field(ge=1, description="steps between sums")

class Halved(Plain):
    """Sends a half."""
    name = "halved"
    fidelity, alone = Fidelity.LOSSY, False
    ratio: float = Field(0.5, gt=0, le=1, description="share that is sent")
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_users_own_members_are_plan_words(own) -> None:
    text = f"dp=2 sync={own}:Patient:h=8 codec={own}:Halved:ratio=0.25"
    plan = Plan.parse(text)
    assert str(plan) == text
    assert plan.check() == []
    assert member("sync", plan.sync).h == 8
    assert member("codec", plan.codec).ratio == 0.25


@pytest.mark.parametrize(
    ("value", "codes", "words"),
    [
        ("sync={}:Patient", {"P05"}, "lacks its option h"),
        ("sync={}:Patient:h=no", {"P05"}, "h: input should be a valid integer"),
        ("sync={}:Patient:hh=3,h=2", {"P05"}, "did you mean h?"),
        ("codec={}:Halved:ratio=2", {"P05"}, "less than or equal to 1"),
        ("sync={}:Halved", {"P04"}, "has no policy Halved"),
        ("codec={}:Absent", {"P04"}, "has no codec Absent"),
        ("codec={}:Halved+ef", {"P23"}, "loses nothing"),
    ],
)
def test_a_users_own_members_are_held_to_their_fields(own, value: str, codes: set[str], words: str) -> None:
    problems = Plan.parse(f"dp=2 {value.format(own)}").check()
    assert {p.code for p in problems} == codes
    assert words in problems[0].what


def test_reading_a_plan_runs_no_code_of_a_users() -> None:
    """A report of somebody else's run reads its plan."""
    plan = Plan.parse("dp=2 sync=/nowhere/mine.py:Patient:h=8")
    (problem,) = plan.check()
    assert (problem.code, problem.where) == ("C03", "plan.sync")


def test_a_users_own_member_says_whether_it_means_something_alone(own) -> None:
    assert {p.code for p in Plan.parse(f"sync={own}:Patient:h=2").check()} == {"P16"}
    assert {p.code for p in Plan.parse(f"codec={own}:Halved").check()} == {"P16"}


@pytest.mark.parametrize(
    "text",
    ["shard=2 zero=3:wire=int8,prefetch=2", "dp=2 precision=bf16:params", "dp=1 precision=fp16:scale=1024"],
)
def test_options_of_plain_values_travel_with_them(text: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == text and Plan.parse(str(plan)) == plan and hash(Plan.parse(text)) == hash(plan)
    bare = Plan.parse(" ".join(word.partition(":")[0] for word in text.split()))
    assert plan != bare and (plan.zero, plan.precision) == (bare.zero, bare.precision)
    assert replace(plan, micros=2).options == plan.options


def test_options_belong_to_the_value_behind_which_they_stand() -> None:
    plan = Plan.parse("shard=2 zero=3:wire=int8 precision=bf16:params")
    assert str(replace(plan, zero=2, precision="fp64")) == "shard=2 zero=2 precision=fp64"
    assert plan.wires.gather == plan.wires.scatter == "int8" and plan.arithmetic.params
    assert not Plan().wires.gather and not Plan().arithmetic.params
