"""A rank that others start, for tests: `python -m tests.launch.in_env add|raise|all`. Prints one JSON line."""

import json
import sys
from typing import Any

from unisono.launch.context import flush_and_leave
from unisono.launch.env import run_in_env


def entry(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    if argument["what"] == "all" or (argument["what"] == "raise" and ctx.rank == 1):
        raise ValueError("no more")
    x = torch.ones(1) * (ctx.rank + 1)
    dist.all_reduce(x)
    return {"rank": ctx.rank, "sum": x.item()}


if __name__ == "__main__":
    outcome = run_in_env("tests.launch.in_env:entry", {"what": sys.argv[1]}, backend="gloo", timeout=60)
    error = outcome.error.as_dict() if outcome.error is not None else None
    shared = outcome.error is not None and outcome.error.shared
    said = {"exit": outcome.exit, "error": error, "shared": shared, **(outcome.results[0] or {})}
    sys.stdout.write(json.dumps(said) + "\n")  # one write: ranks share the pipe
    flush_and_leave(outcome.exit)
