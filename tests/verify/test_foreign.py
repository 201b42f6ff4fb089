"""Models that others wrote, as plain modules, under plans: cut and dealt along their graph, against one device."""

from pathlib import Path

import pytest

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.spec.errors import UnisonoError

FILE = Path(__file__).parents[1] / "models" / "foreign.py"
GROUPS = (  # each on ranks of one size, within the time that a set of ranks is given
    ("dp=2", "shard=2", "dp=2 sync=canonical"),
    ("pp=2", "tp=2", "tp=3"),
    ("tp=2 pp=2", "dp=2 tp=2"),
    ("shard=2 tp=2", "shard=2 pp=2"),
)

pytestmark = pytest.mark.timeout(900)


def recipe(name: str, *, tokens: bool, loss: str | None = None) -> Recipe:
    keys = {"context": 12} if tokens else {}
    return Recipe(
        seed=3,
        model=ModelConfig(kind=f"{FILE}:{name}", **keys),
        data=DataConfig(source=f"text:{FILE}" if tokens else "digits"),
        train=TrainConfig(
            steps=3, global_batch=8, micro_batch=2, lr=1e-2, clip=0.5, dtype="float64", loss=loss
        ),
    )


def held(of: Recipe, *texts: str) -> None:
    """Every plan is proven; those that change no sum to the bit."""
    proofs = prove(of, [Plan.parse(f"{text} precision=fp64") for text in texts], steps=2)
    for proof in proofs:
        assert proof.passed, proof
        assert proof.bit_identical or proof.fidelity == "ROUNDING", proof


def test_a_gated_mixer_is_one_device_under_tp_with_keys_of_memory() -> None:
    held(recipe("mixer", tokens=True), "tp=2 recompute=full offload=optimizer")


@pytest.mark.slow
@pytest.mark.parametrize("plans", GROUPS, ids=lambda plans: plans[0])
@pytest.mark.parametrize("name", ["mixer", "hand", "encoder"])
def test_foreign_models_of_tokens_are_one_device(name: str, plans: tuple[str, ...]) -> None:
    held(recipe(name, tokens=True), *plans)


@pytest.mark.slow
@pytest.mark.parametrize("plans", GROUPS, ids=lambda plans: plans[0])
@pytest.mark.parametrize("name", ["unet", "residual", "pair"])
def test_foreign_models_of_pictures_are_one_device(name: str, plans: tuple[str, ...]) -> None:
    held(recipe(name, tokens=False), *plans)


@pytest.mark.slow
def test_foreign_models_go_through_timetables_and_are_computed_again() -> None:
    of = recipe("hand", tokens=True)
    held(of, "pp=2 schedule=zb1p recompute=full", "pp=3 schedule=gpipe recompute=full")
    held(of, "tp=2 pp=2 schedule=interleaved:v=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("hand", ("pp=2 schedule=dualpipev", "dp=2 offload=optimizer", "pp=2 offload=params")),
        (
            "unet",
            ("pp=2 schedule=dualpipev recompute=full", "shard=2 zero=1 blocks=0-2:recompute=full;3-6:zero=2"),
        ),
        ("unet", ("pp=2 tp=2 schedule=interleaved:v=2 recompute=full",)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_foreign_models_under_keys_of_memory(name: str, plans: tuple[str, ...]) -> None:
    held(recipe(name, tokens=name == "hand"), *plans)


@pytest.mark.slow
def test_foreign_models_in_bf16_are_one_device_in_bf16() -> None:
    of = recipe("unet", tokens=False)
    of = of.model_copy(update={"train": of.train.model_copy(update={"dtype": "float32"})})
    for proof in prove(of, [Plan.parse(f"{text} precision=bf16") for text in ("dp=2", "pp=2")], steps=1):
        assert proof.passed, proof


def test_what_a_graph_does_not_name_is_refused() -> None:
    with pytest.raises(UnisonoError, match="no positions that could be split") as caught:
        prove(recipe("mixer", tokens=True), [Plan.parse("cp=2 precision=fp64")], steps=1)
    assert caught.value.code == "P12" and caught.value.fix


@pytest.mark.slow
def test_losses_of_the_users_are_right_under_tp() -> None:
    held(recipe("smoothed", tokens=True), "tp=2", "tp=2 pp=2", "dp=2 tp=2")  # its own, of two outputs
    held(recipe("mixer", tokens=True, loss="cross_entropy:smoothing=0.1"), "tp=2", "tp=2 pp=2")


@pytest.mark.slow
def test_what_has_no_graph_is_spread_whole_or_refused_with_its_line() -> None:
    of = recipe("branching", tokens=False)
    held(of, "dp=2", "shard=2")
    for text, code in (("tp=2", "P12"), ("pp=2", "P13")):
        with pytest.raises(UnisonoError, match=r"branches on numbers of a tensor .*foreign.py:\d+") as caught:
            held(of, text)
        assert caught.value.code == code


@pytest.mark.slow
def test_more_ranks_than_anything_can_be_dealt_to_are_refused() -> None:
    with pytest.raises(UnisonoError, match="is the largest count in this model") as caught:
        prove(recipe("narrow", tokens=False), [Plan.parse("tp=11 precision=fp64")], steps=1)
    assert caught.value.code == "P12"
