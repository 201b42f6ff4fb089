"""Whole runs of a small GPT under plans, each played once and kept in a file: what is there is not run again.

A byte-level GPT learns the standard library's sources, by AdamW in cosine decay to a tenth. A seed draws weights and
samples; with one seed all runs of a size begin alike and see the same. Losses are in nats a byte, of the same windows
for all.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.config import DataConfig, LaunchConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import NullChannel, RankContext
from unisono.launch.fork_server import ForkServer
from unisono.spec.errors import UnisonoError

SIZES = {
    "3M": ModelConfig(n_layer=4, n_head=4, d_model=256, context=32),
    "small": ModelConfig(n_layer=3, n_head=4, d_model=88, context=32),
}
MOST = 6  # doublings or halvings of a learning rate
WINDOWS = 512
"""Of the held-out text, of which losses are taken."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """What is asked for. way: the plan's own, or a peer's name, see `whole_runs.main`. steps: of the schedule. until:
    after how many of them the run ends, 0: after all. every: steps from one look at the held-out loss to the next.
    batch: samples of a step over all ranks. servers: of parameters. lab: the link, where ranks are hosts of a lab."""

    plan: str
    seed: int
    steps: int
    lr: float
    size: str = "3M"
    optimizer: str = "adamw"
    batch: int = 4
    way: str = "ours"
    until: int = 0
    every: int = 0
    servers: int = 0
    lab: str = ""

    @property
    def ranks(self) -> int:
        """Of the plan, which has no axis but `dp`."""
        return int(self.plan.split()[0].removeprefix("dp="))

    @property
    def micros(self) -> int:
        return next((int(word[7:]) for word in self.plan.split() if word.startswith("micros=")), 1)

    def recipe(self) -> Recipe:
        return Recipe(
            name="whole-runs", seed=self.seed, model=SIZES[self.size],
            data=DataConfig(source="stdlib", tokenizer="byte"),
            train=TrainConfig(
                steps=self.steps, global_batch=self.batch, micro_batch=self.batch // (self.ranks * self.micros),
                optimizer=self.optimizer, lr=self.lr, min_lr=self.lr / 10, lr_schedule="cosine",
                warmup_steps=max(1, self.steps // 20), eval_batches=WINDOWS // self.batch,
            ),
            launch=LaunchConfig(servers=self.servers or None),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Played:
    """What is looked at of a nursery's outcome."""

    results: Sequence[Any]
    error: None = None

    def why(self) -> str:
        return ""


class OneProcess:
    """Ranks as threads of this process, one at a time: what a busy machine with few cores is quickest with, and in the
    same order each time, also under policies that wait for nobody. Seconds mean nothing in it."""

    def run(self, argument: dict[str, Any], ranks: int, *_: Any, **__: Any) -> Played:
        import torch
        import whole_runs

        from unisono_contrib.comm import threads

        torch.set_num_threads(1)
        corpus = whole_runs.prepare(argument)

        def rank_of(rank: int) -> dict[str, Any]:
            ctx = RankContext(
                rank, ranks, rank, ranks, "here", 1, threads.BACKEND, threads.store(), NullChannel(), "token"
            )
            return whole_runs.main(ctx, argument, corpus)

        return Played(threads.run(ranks, rank_of, timeout=3600.0))


class KeptRuns:
    """Runs by what was wanted, in `path` or in memory alone. Beside each: seconds, and the load of the machine."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        kept = self.path.read_text() if self.path is not None and self.path.exists() else '{"runs": []}'
        self.runs: list[dict[str, Any]] = json.loads(kept)["runs"]

    def known(self, wanted: WholeRun) -> dict[str, Any] | None:
        return next((run for run in self.runs if run["run"] == asdict(wanted)), None)

    def play(
        self,
        nursery: ForkServer | OneProcess,
        wanted: WholeRun,
        doors: Sequence[str] = (),
        timeout: float = 900.0,
        **more: Any,
    ) -> dict[str, Any]:
        """What rank 0 saw of the run, with `payload_bytes` and `payload_peak` of the rank that sent most; or `refused`
        alone, why there is none. Raises SystemExit where it fails. more: for `whole_runs.main`."""
        if (run := self.known(wanted)) is not None:
            return run
        begun = time.perf_counter()
        try:
            resolve(wanted.recipe(), wanted.plan, wanted.ranks)
        except (UnisonoError, ValidationError) as error:
            why = error.what if isinstance(error, UnisonoError) else error.errors()[0]["msg"]
            return {"run": asdict(wanted), "refused": why}
        argument = {
            "recipe": wanted.recipe().model_dump_json(exclude_unset=True), "plan": wanted.plan, "way": wanted.way,
            "steps": wanted.until or wanted.steps, "every": wanted.every, "doors": list(doors), **more,
        }  # fmt: skip
        outcome = nursery.run(argument, wanted.ranks, 1, timeout=timeout, backend="gloo")
        if outcome.error is not None or outcome.results[0] is None:
            raise SystemExit(f"{wanted.plan}: {outcome.why()}")
        run = {"run": asdict(wanted), **seen(outcome.results), "seconds": time.perf_counter() - begun}
        self.runs.append(run)
        self.keep()
        loss, seconds = run["points"][-1][1], run["seconds"]
        what = wanted.way if wanted.way != "ours" else wanted.plan
        where = f"{wanted.optimizer} lr={wanted.lr:g} seed={wanted.seed} {wanted.until or wanted.steps} steps"
        print(f"{what:<78} {where:<40} {loss:.4f}  {seconds:.0f} s", file=sys.stderr, flush=True)
        return run

    def keep(self) -> None:
        if self.path is not None:
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(json.dumps({"schema_version": 1, "runs": self.runs}) + "\n")
            beside.replace(self.path)


def seen(results: Sequence[Any]) -> dict[str, Any]:
    """Of all ranks' results what is kept."""
    first: Mapping[str, Any] = results[0]
    counted = [result for result in results if result["payload_bytes"] is not None]
    most = max(counted, key=lambda result: result["payload_bytes"], default=None)
    return {
        "points": first["points"], "clock": first["clock"], "took": [round(x, 6) for x in first["took"]],
        "load": first["load"], "staleness": first["staleness"], "distance": first["distance"],
        "device_bytes": max(result["device_bytes"] for result in results),
        "payload_bytes": most and most["payload_bytes"],
        # The last step of a run is a meeting of all that replicas have, under every policy.
        "payload_peak": most and max(most["payload_steps"][:-1], default=0),
        "payload_last": most and most["payload_steps"][-1],
        "payload_meeting": most and sorted({n for n in most["payload_steps"] if n})[-8:],
    }  # fmt: skip


def loss_of(run: Mapping[str, Any]) -> float:
    """Held-out loss after the last step; infinite where it is not a number."""
    loss = run["points"][-1][1]
    return loss if loss == loss else float("inf")


def tuned(loss: Callable[[float], float], start: float) -> float:
    """The learning rate with the least loss among `start` times powers of two, of which it tries few."""
    seen = {0: loss(start)}

    def at(power: int) -> float:
        if power not in seen:
            seen[power] = loss(start * 2.0**power)
        return seen[power]

    best = 0
    for _ in range(MOST):
        better = min((best - 1, best, best + 1), key=at)
        if better == best:
            break
        best = better
    return start * 2.0**best
