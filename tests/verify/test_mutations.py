"""Every planted bug is caught, most with the right cause. The catalogue is in `mutations/`."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.threads import ThreadNursery
from tests.verify.mutations.entry import CATALOGUE, UNSEEN
from tests.verify.mutations.planting import Bug, Planting
from unisono.config import Recipe
from unisono.plan import Plan
from unisono.verify.prover import Proof, ProofRanks, prove_on

STAGE = ProofRanks(keep_going=True)
QUICK = (
    "all_but_the_last_micro_batch_lost",
    "loss_by_local_tokens",
    "norm_gradients_not_summed_over_tp",
    "norm_of_own_shard",
    "tied_stages_not_joined",
    "dropout_seeded_by_rank",
    "canonical_order_changed",
    "one_element_off_by_a_billionth",
    "a21_validation_loss_times_tp",
    "a59_rate_counted_from_the_resume",
)


def recipe(bug: Bug, folder: Path) -> Recipe:
    model = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "dropout": bug.dropout}
    train = {
        "steps": 6, "global_batch": 8, "micro_batch": 1, "dtype": "float64", "lr": 1e-2, "warmup_steps": 2,
        "clip": 0.5, "optimizer": bug.optimizer,
    }  # fmt: skip
    data = {}
    if bug.text:
        data["source"] = f"text:{folder / 'text.txt'}"
        (folder / "text.txt").write_text(bug.text * 60)
    sections = {"model": model, "train": train, "data": data}
    for key, value in bug.recipe.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    if "kind" in model:
        sections["model"] = {"kind": model["kind"], "context": 8}
    return Recipe(seed=3, **sections)


def prove_with(bugs: list[Bug], steps: int = 2) -> dict[str, Proof]:
    """Name → what came of its plan."""
    found: dict[str, Proof] = {}
    nursery = ThreadNursery("tests.verify.mutations.entry:main")
    for chosen in alike(bugs):
        plans = [Plan.parse(b.plan) for b in chosen]
        with TemporaryDirectory() as folder:
            given = recipe(chosen[0], Path(folder))
            proofs = prove_on(nursery, given, plans, steps, stage=STAGE, marks=[b.name for b in chosen])
        found |= dict(zip([b.name for b in chosen], proofs, strict=True))
    return found


def alike(bugs: list[Bug]) -> list[list[Bug]]:
    """Bugs of one recipe together: they share a reference. A bug that the reference has too is alone."""
    kinds: dict[object, list[Bug]] = {}
    for bug in bugs:
        kind = bug.dropout, bug.optimizer, str(bug.recipe), bug.text, bug.both and bug.name
        kinds.setdefault(kind, []).append(bug)
    return list(kinds.values())


def table(proofs: dict[str, Proof]) -> str:
    return "\n".join(
        f"{name}: {p.cause} (one of {' '.join(CATALOGUE[name].causes)}): {p.explanation} | {p.first_divergence}"
        for name, p in proofs.items()
    )


@pytest.mark.parametrize("name", [*CATALOGUE, *UNSEEN])
def test_a_bug_has_a_place_to_be_planted(name: str):
    """Quick, and the first to say so when what a bug patches has another name."""
    with Planting().of((CATALOGUE | UNSEEN)[name]):
        pass


@pytest.mark.timeout(240)
def test_some_planted_bugs_are_caught_and_named():
    proofs = prove_with([CATALOGUE[name] for name in QUICK])
    for name, proof in proofs.items():
        assert not proof.passed, name
        assert proof.cause in CATALOGUE[name].causes, table({name: proof})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_planted_bug_is_caught_and_most_are_named():
    assert len(CATALOGUE) >= 40
    wanted = os.environ.get("BUGS", "").split()
    proofs = prove_with([b for b in CATALOGUE.values() if not wanted or b.name in wanted])
    escaped = [name for name, proof in proofs.items() if proof.passed]
    assert not escaped, escaped
    assert [n for n, p in proofs.items() if p.cause == "raised"] == [], table(proofs)
    misnamed = {n: p for n, p in proofs.items() if p.cause not in CATALOGUE[n].causes}
    assert len(misnamed) <= 0.2 * len(proofs), table(misnamed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_no_proof_can_see_is_found_by_a_quick_test():
    words = [sys.executable, "-m", "tests.verify.mutations", *UNSEEN]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
