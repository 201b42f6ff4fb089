"""Every planted bug is caught, most with the right cause. The catalogue is in `mutations/`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daily import is_today
from tests.verify.mutations.entry import CATALOGUE, UNSEEN
from tests.verify.mutations.planting import Planting
from tests.verify.mutations.proving import Found, prove_with

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


def table(proofs: dict[str, Found]) -> str:
    return "\n".join(
        f"{name}: {p.cause} (one of {' '.join(CATALOGUE[name].causes)}): {p.text} | step {p.step}"
        for name, p in proofs.items()
    )


@pytest.mark.parametrize("name", [*CATALOGUE, *UNSEEN])
def test_a_bug_has_a_place_to_be_planted(name: str):
    """Quick, and the first to say so when what a bug patches has another name."""
    with Planting().of((CATALOGUE | UNSEEN)[name]):
        pass


@pytest.mark.timeout(240)
def test_some_planted_bugs_are_caught_and_named():
    """Half of QUICK each day; all of them, and all others, in make test-all."""
    proofs = prove_with(CATALOGUE[name] for number, name in enumerate(QUICK) if is_today(number, 2))
    for name, proof in proofs.items():
        assert proof.caught, name
        assert proof.named(CATALOGUE[name]), table({name: proof})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_planted_bug_is_caught_and_most_are_named():
    wanted = os.environ.get("BUGS", "").split()
    proofs = prove_with(b for b in CATALOGUE.values() if not wanted or b.name in wanted)
    assert [name for name, proof in proofs.items() if not proof.caught] == []
    assert [n for n, p in proofs.items() if p.cause == "raised" and not p.named(CATALOGUE[n])] == [], table(
        proofs
    )
    misnamed = {n: p for n, p in proofs.items() if not p.named(CATALOGUE[n])}
    assert len(misnamed) <= 0.2 * len(proofs), table(misnamed)
    late = [n for n, p in proofs.items() if CATALOGUE[n].source and p.step != 1]
    assert len(late) <= 1, late


def test_the_catalogue_goes_beyond_one_axis_of_two():
    """Bugs that only composed plans show are planted under composed plans; a user's own loop has its own."""
    composed = [b for b in CATALOGUE.values() if len(b.degrees) > 1]
    loops = [b for b in CATALOGUE.values() if b.loop is not None]
    assert len(composed) >= 15 and len(loops) >= 10 and sum(bool(b.source) for b in CATALOGUE.values()) >= 20
    assert all(2 * sum(max(b.degrees) > 2 for b in some) >= len(some) for some in (composed, loops))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_no_proof_can_see_is_found_by_a_quick_test():
    words = [sys.executable, "-m", "tests.verify.mutations", *UNSEEN]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
