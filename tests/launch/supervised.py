"""A supervisor in a process of its own, for tests that kill or interrupt it: `python -m tests.launch.supervised how`.

Writes one JSON object a line to standard output: pids as ranks are ready, then what the ranks were told, then the exit.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono.launch.fork_server import ForkServer


def entry(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    dist.barrier()
    ctx.channel.send("ready", pid=os.getpid())
    steps = 0
    if argument["how"] == "stuck" and ctx.rank == 1:
        os.read(os.pipe()[0], 1)  # for ever
    while argument["how"] != "polite" or not agreed(ctx):
        steps += 1
        dist.barrier()
    return {"steps": steps}


def agreed(ctx: Any) -> bool:
    import torch
    import torch.distributed as dist

    wish = torch.tensor(float(ctx.channel.stop_requested()))
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    return bool(wish)


def main() -> None:
    def say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] in ("ready", "stopping"):
            say(**event, rank=rank)

    with ForkServer("tests.launch.supervised:entry", path=[str(Path(__file__).parents[2])]) as nursery:
        say(kind="helper", pid=nursery.pid)
        grace = {"graced": 1.5, "stuck": 1.0}.get(sys.argv[1])
        outcome = nursery.run({"how": sys.argv[1]}, 3, on_event=hear, grace=grace)
    what = outcome.error.what if outcome.error else None
    say(kind="over", exit=outcome.exit, results=outcome.results, error=what, stopped=outcome.stopped)


if __name__ == "__main__":
    main()
