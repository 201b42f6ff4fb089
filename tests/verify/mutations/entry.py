"""Ranks of a proof with a bug in them: the job's mark is its name."""

from typing import Any

from tests.verify.mutations import (
    in_both,
    in_clipping,
    in_context,
    in_data,
    in_experts,
    in_history,
    in_layers,
    in_loops,
    in_memory,
    in_meshes,
    in_numbers,
    in_runs,
    in_stages,
    in_sums,
    in_tables,
    in_tensor,
    in_updates,
    in_virtual,
)
from tests.verify.mutations.planting import Planting, bugs_of
from unisono.verify import prover_rank as verify_rank
from unisono.verify.prover_rank import prepare

__all__ = ["CATALOGUE", "UNSEEN", "main", "prepare"]

CATALOGUE = bugs_of(
    in_context,
    in_data,
    in_experts,
    in_sums,
    in_layers,
    in_clipping,
    in_updates,
    in_runs,
    in_meshes,
    in_loops,
    in_history,
    in_stages,
    in_numbers,
    in_memory,
    in_tables,
    in_virtual,
    in_tensor,
)
UNSEEN = bugs_of(in_both)
PLANTING = Planting()


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """As the real one; the bug is there only while a plan is played, or one device too if it is a bug of both."""

    def around(job: Any) -> Any:
        bug = CATALOGUE.get(job["mark"])
        planted = bug is not None and (bug.both or argument["do"] == "prove")
        return PLANTING.of(bug if planted else None)

    return verify_rank.main(ctx, argument, corpus, around=around)
