"""What `sync=priority` gives on slow links: steps of dp=4 beside `every_step`, interleaved in one run.

    python benchmarks/priority.py                          25 Mbit/s, 4 hosts, a GPT of 0.8 M parameters, 9 rounds
    python benchmarks/priority.py --rate 100mbit --width 256 --rounds 5 --ways every_step priority:slice=0.5

Hosts are those of `unisono lab`, one rank each; needs root. Each way is a real run: its step, policy and optimiser.
Only the products of the model are replaced: each part of it (stem, blocks, head) waits for its share of the time that a
step computes, a third in forward and two thirds in backward, and then has gradients of the right shapes. So ranks of
four hosts do not compete for this machine's cores. `--compute` says how long: of the time that the link takes for a
step's gradients (1.0).

time: of a step, the median of the rounds, and where nine tenths lie. exposed: what a step waits for communication.
share: exposed, of all the time that communication takes. Then one step of the last round as its trace has it: when
communication begins beside the end of backward, and in which order slices arrive.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab
import torch
from torch import Tensor, nn

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.launch.fork_server import ForkServer
from unisono.observe.span import Recorder, Span
from unisono.spec import words
from unisono.spec.errors import Skipped
from unisono.train.build.build import build, connect, feeds, place_of
from unisono.train.data.feed import Feed
from unisono.train.data.load import load
from unisono.train.step.run import Run
from unisono.train.step.train_step import train
from unisono_contrib.lab.links import LabLink, rate_of
from unisono_contrib.lab.network import LabNetwork, require
from unisono_contrib.measure.benches import columns, spread
from unisono_contrib.train.step.ahead import AheadGradients, parts_of, run_ahead

WAYS = ("every_step", "priority:slice=0.125")
HOSTS, STEPS, FORWARD = 4, 4, 1 / 3
WARM = 4  # steps before the first round: the order of slices is settled in the second


class Waits(torch.autograd.Function):
    """One part of the model: waits, and has gradients of its parameters' shapes."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, seconds: float, grads: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.seconds, ctx.grads = seconds, grads
        time.sleep(seconds * FORWARD)
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, *back: Tensor) -> Any:
        time.sleep(ctx.seconds * (1 - FORWARD))
        return back[0], None, None, *(grad.clone() for grad in ctx.grads)


def replace_products(run: Run, seconds: float) -> None:
    """Let each part wait for its share of `seconds`, by its parameters, in the place of computing."""
    parts = parts_of(run.local)
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    draw = torch.Generator().manual_seed(run.mesh.rank)
    for part, size in zip(parts, sizes, strict=True):
        params = list(part.parameters())
        grads = [torch.randn(p.shape, generator=draw).mul_(1e-3) for p in params]
        part.forward = _waiting(params, grads, seconds * size / sum(sizes))  # type: ignore[method-assign]
    (stage,) = run.local.stages.values()
    stage.loss = lambda y, targets: y.sum()


def _waiting(params: Sequence[nn.Parameter], grads: Sequence[Tensor], seconds: float) -> Any:
    def forward(x: Tensor, *_: object) -> Tensor:
        carry = x if x.is_floating_point() else torch.zeros(1, requires_grad=True)
        return Waits.apply(carry, seconds, grads, *params)  # type: ignore[no-any-return]

    return forward


@dataclass
class Way:
    """One run under way."""

    run: Run
    feed: Feed
    spans: Sequence[Span] = ()

    def steps(self, count: int) -> dict[str, float]:
        """Seconds of a step, and of its communication: exposed and hidden."""
        self.run.mesh.world.barrier()
        self.run.recorder.lap()
        self.run.recorder.keep = True  # or nobody writes down when sums end that nobody waits for
        begun = time.perf_counter()
        for _ in train(self.run, self.feed, self.run.step + count):
            pass
        self.run.gradients.finish() if isinstance(self.run.gradients, AheadGradients) else None
        took, lap = time.perf_counter() - begun, self.run.recorder.lap().seconds
        self.run.recorder.keep, self.spans = False, self.run.recorder.take()
        return {
            "seconds": took / count,
            "exposed": lap.get("comm_exposed", 0.0) / count,
            "hidden": lap.get("comm_hidden", 0.0) / count,
        }


def started(ctx: RankContext, sync: str, size: dict[str, int], seconds: float) -> Way:
    recipe = Recipe(
        name="priority", seed=0, model=ModelConfig(context=32, **size),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(steps=10**6, global_batch=ctx.world, micro_batch=1, clip=0.0, eval_every=0, save_every=0),
    )  # fmt: skip
    resolved = resolve(recipe, f"dp={ctx.world} sync={sync}", ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    if said := run_ahead(run, resolved.recipe.train):
        raise RuntimeError(said)
    replace_products(run, seconds)
    return Way(run, feeds(resolved.recipe, resolved.plan, corpus, place.device)[0])


def main(ctx: RankContext, argument: dict[str, Any], shared: object = None) -> dict[str, Any]:
    """Of each rank: what each way took in each round, and one step of it as spans."""
    lab.enter(argument["doors"][ctx.rank])
    connect(place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0), ctx.store)
    ways = {name: started(ctx, name, argument["size"], argument["seconds"]) for name in argument["ways"]}
    for way in ways.values():
        way.steps(WARM)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(argument["rounds"]):
        for name, way in ways.items():
            rounds[name].append(way.steps(STEPS))
    drawn = {name: drawn_step(way) for name, way in ways.items()}
    return {"rounds": rounds, "drawn": drawn, "load": os.getloadavg()[0]}


def drawn_step(way: Way) -> list[list[Any]]:
    """[kind, start, stop, slice] of a step's spans and of those of the forward behind it, in seconds from the start of
    its backward."""
    way.steps(2)
    spans = sorted(way.spans, key=lambda span: span.start_ns)
    begun, after = [span.start_ns for span in spans if span.kind == "backward" and "op" not in span.tags][:2]
    return [
        [s.kind, (s.start_ns - begun) * 1e-9, (s.stop_ns - begun) * 1e-9, s.tags.get("slice", "")]
        for s in spans
        if begun <= s.start_ns < after and s.tags.get("op") in (None, "all_reduce")
    ]


def told(name: str, spans: Sequence[tuple[str, float, float, str]]) -> list[str]:
    """When communication begins beside the end of backward, and in which order slices arrive."""
    ended = next(stop for kind, _, stop, _ in spans if kind == "backward")
    sums = [span for span in spans if span[0] == "comm"]
    first = min(start for _, start, _, _ in sums)
    word = "before" if first < ended else "AFTER"
    lines = [
        f"{name}: backward takes {words.seconds(ended)}, communication begins after {words.seconds(max(first, 0.0))}:"
        f" {word} backward ends"
    ]
    landed: dict[str, float] = {}
    for _, _, stop, part in sums:
        if part:
            landed[part] = max(stop, landed.get(part, 0.0))
    order = sorted(landed, key=lambda part: landed[part])
    late = [part for part in order if landed[part] > ended]
    if late:
        lines.append(
            f"  {len(order) - len(late)} of {len(order)} slices arrive during backward; then, in this order:"
        )
        lines += [f"  {words.seconds(landed[part] - ended):>9} after it  {part}" for part in late]
    return lines


def line(name: str, rounds: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> tuple[str, ...]:
    took = spread([one["seconds"] for one in rounds])
    exposed = statistics.median(one["exposed"] for one in rounds)
    share = statistics.median(one["exposed"] / (one["exposed"] + one["hidden"]) for one in rounds)
    ratio = spread([mine["seconds"] / theirs["seconds"] for mine, theirs in zip(rounds, base, strict=True)])
    return (
        name, words.seconds(took["seconds"]),
        f"{words.seconds(took['seconds_p05'])} to {words.seconds(took['seconds_p95'])}",
        f"{ratio['seconds']:.3f}", f"{ratio['seconds_p05']:.3f} to {ratio['seconds_p95']:.3f}",
        words.seconds(exposed), f"{share:.0%}",
    )  # fmt: skip


def command() -> int:
    options = arguments()
    try:
        require(LabLink(options.rate))
    except Skipped as error:
        print(error.render(), file=sys.stderr)
        return error.exit
    size = {"n_layer": options.layers, "n_head": 4, "d_model": options.width}
    numel = options.layers * 12 * options.width**2 + 288 * options.width
    link = 2 * (HOSTS - 1) / HOSTS * 4 * numel * 8 / options.rate
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start")
    with (
        ForkServer("priority:main", path=[str(Path(__file__).parent)]) as nursery,
        LabNetwork(HOSTS, LabLink(options.rate)) as network,
    ):
        asked = {
            "doors": list(network.doors), "size": size, "seconds": link * options.compute, "ways": list(options.ways),
            "rounds": options.rounds,
        }  # fmt: skip
        outcome = nursery.run(asked, HOSTS, 1, timeout=900.0, backend="gloo")
    if outcome.error is not None or outcome.results[0] is None:
        raise SystemExit(outcome.error.render() if outcome.error else "stopped")
    got: Any = outcome.results[0]
    print(
        f"\n{options.rate / 1e6:g} Mbit/s, {HOSTS} hosts, {numel / 1e6:.1f} M parameters; a step computes"
        f" {words.seconds(link * options.compute)}, the link takes at least {words.seconds(link)};"
        f" {options.rounds} rounds of {STEPS} steps, load {got['load']:.1f}"
    )
    base = got["rounds"][options.ways[0]]
    head = ("sync", "time", "90 % within", "of the first", "90 % within", "exposed", "share")
    for text in columns(head, [line(name, rounds, base) for name, rounds in got["rounds"].items()]):
        print(text)
    for name, spans in got["drawn"].items():
        print("\n" + "\n".join(told(name, spans)))
    if options.json:
        Path(options.json).write_text(json.dumps({"schema_version": 1, **got}, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", type=rate_of, default=25e6, metavar="R", help="of each link (25mbit)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--compute", type=float, default=1.0, help="computation over communication (1.0)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), metavar="SYNC", help="values of sync=")
    parser.add_argument("--json", metavar="FILE", help="write what was measured there as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(command())
