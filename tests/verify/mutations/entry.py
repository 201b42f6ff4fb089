"""Ranks of a proof with a bug in them: the job's mark is its name."""

from typing import Any

from tests.verify.mutations import in_clipping, in_data, in_layers, in_sums, in_updates
from tests.verify.mutations.planting import Planting, bugs_of
from unisono.verify import prover_rank as verify_rank
from unisono.verify.prover_rank import prepare

__all__ = ["CATALOGUE", "main", "prepare"]

CATALOGUE = bugs_of(in_data, in_sums, in_layers, in_clipping, in_updates)
PLANTING = Planting()


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """As the real one; the bug is there only while a plan is played."""
    return verify_rank.main(ctx, argument, corpus, around=lambda job: PLANTING.of(CATALOGUE.get(job["mark"])))
