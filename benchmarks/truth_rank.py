"""One plan, played for a while on a host of the lab: the part of `cpu_truth` that every rank plays."""

from typing import Any

import lab

from unisono.launch.context import RankContext
from unisono.measure import rank


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """As `rank.main`, first entering a host; hosts: of the lab, dealt to the ranks in runs."""
    hosts = argument["hosts"]
    if hosts:
        lab.enter(hosts[ctx.rank * len(hosts) // ctx.world])
    return rank.main(ctx, {**argument, "ask": "plan"}, shared)
