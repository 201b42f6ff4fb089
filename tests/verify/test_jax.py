"""JAX as a second engine: under our plans it computes what torch's, NumPy's and its own one device compute."""

import os
from pathlib import Path

import pytest

from tests.verify.engines import LLAMA, beside, recipe
from unisono.cli import main
from unisono.programs.pipeline import COMPUTE, SENDS, lower
from unisono.programs.schedules import SCHEDULES
from unisono_contrib.verify.engines import session
from unisono_contrib.verify.engines.jax import JaxEngine

pytest.importorskip("jax", reason="jax is not installed: pip install 'unisono[jax]'")
pytestmark = pytest.mark.timeout(900)

GROUPS = (
    ("dp=2", "shard=2", "shard=2 zero=2", "shard=2 zero=1"),
    ("tp=2", "dp=2 tp=2", "dp=2 shard=2 tp=2"),
    ("pp=2", "pp=2 schedule=gpipe", "pp=2 schedule=zb1p", "pp=2 tp=2"),
    ("pp=2 schedule=interleaved:v=2", "pp=2 schedule=zbv", "pp=2 schedule=dualpipe"),
)


def held(of: object, plans: tuple[str, ...], engine: str = "jax") -> None:
    """All three engines agree about one device, and torch's and JAX's plans with them."""
    proofs, rows, odd = beside(of, plans, witnesses=["numpy"], engines=[engine], steps=1)  # type: ignore[arg-type]
    assert all(proofs) and odd == []
    assert [row.plan for row in rows if row.engine == "jax" and row.ranks > 1] == [p.plan for p in proofs]
    for row in rows:
        assert row.passed and max(row.max_rel_err.values()) < 1e-12, row
        if row.engine == "jax" and row.ranks > 1:
            assert set(row.against) == {"torch", "numpy", "jax"}


def test_a_plan_in_jax_is_one_device() -> None:
    held(recipe(), ("tp=2 pp=2",))


@pytest.mark.slow
@pytest.mark.parametrize("plans", GROUPS, ids=lambda plans: plans[0])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt", "llama"])
def test_plans_in_jax_are_one_device(plans: tuple[str, ...], model: dict[str, object]) -> None:
    held(recipe(**{**model, "n_layer": 4}), plans)


@pytest.mark.slow
def test_as_a_witness_jax_stands_beside_plans_that_it_does_not_play() -> None:
    proofs, rows, _ = beside(recipe(), ["cp=2"], witnesses=["jax", "numpy"], steps=1)
    assert all(proofs) and all(row.passed for row in rows)
    assert {(row.engine, row.ranks): row.against for row in rows} == {
        ("numpy", 1): ("torch", "jax"),
        ("jax", 1): ("torch", "numpy"),
        ("torch", 2): ("numpy", "jax"),
    }


@pytest.mark.slow
def test_a_vocabulary_that_tp_does_not_divide_stays_whole() -> None:
    held(recipe(vocab=257), ("tp=2",))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "shard=2", "tp=2", "pp=2", "pp=2 schedule=zbv", "dp=2 pp=2"])
def test_processes_over_gloo_are_one_device(plan: str) -> None:
    held(recipe(**LLAMA, n_layer=4), (plan,), "jax:processes=true")


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["scaled", "forgetful"])
def test_a_wrong_gradient_in_jax_is_reported_with_its_name(
    plant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[2]), "src")))
    monkeypatch.setattr(JaxEngine, "entry", "tests.verify.planted_jax")
    true = session.tempfile.mkdtemp

    def marked(prefix: str) -> str:
        folder = true(prefix=prefix, dir=tmp_path)
        Path(folder, "plant.txt").write_text(plant)
        return folder

    monkeypatch.setattr(session.tempfile, "mkdtemp", marked)
    proofs, rows, odd = beside(recipe(), ["pp=2"], witnesses=["numpy"], engines=["jax"], steps=1)
    assert all(proofs) and odd == ["jax"]
    failed = [row for row in rows if not row.passed]
    for row in failed:
        assert "jax" in (row.engine, *row.against)
        name = "raw/blocks.1.mlp.down.weight is off by 1.0e-09" if plant == "scaled" else "raw/"
        assert name in str(row.first_divergence), row
    assert {row.engine for row in failed} == {"jax", "numpy", "torch"}


SMALL = (
    "--model.n_layer 2 --model.n_head 4 --model.d_model 8 --model.context 8 --train.global_batch 8".split()
)


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("cp=2", "cp=2"),
        ("dp=2 codec=int8", "codec=int8"),
        ("dp=2 recompute=full", "recompute=full"),
        ("pp=2 offload=optimizer", "offload=optimizer"),
        ("tp=2x2", "tp=2x2"),
        ("dp=2 sync=delayed", "sync=delayed"),
    ],
)
def test_plans_that_jax_does_not_play_are_refused_by_name(
    plan: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *SMALL, "--plan", plan, "--engine", "jax"]) == 2
    said = capsys.readouterr().err
    assert "error U-V07  jax cannot be set beside" in said and what in said


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb1p", "zbv", "dualpipe", "interleaved"])
def test_all_rows_meet_in_one_order_that_each_keeps(name: str) -> None:
    from unisono_contrib.verify.engines.jax.play import program

    timetable = SCHEDULES.read(name).timetable(2, 8)
    order, done = list(program(timetable)), set()
    for row, actions in enumerate(timetable.rows):
        mine = [action for at, action in order if at == row and action.kind in COMPUTE]
        assert mine == [action for action in actions if action.kind in COMPUTE]
    for row, action in order:
        if action.kind in SENDS:
            assert (row, action.stage, action.micro, {"SEND_F": "F", "SEND_B": "B"}[action.kind]) in done
        done.add((row, action.stage, action.micro, action.kind))
    lowered = [action for row in lower(timetable).rows for action in row if action.kind in SENDS]
    assert sorted(map(str, lowered)) == sorted(str(action) for _, action in order if action.kind in SENDS)
