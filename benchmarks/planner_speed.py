"""How many plans a second the planner prices on one core: `python benchmarks/planner_speed.py`.

The screen alone, enumeration included, and two whole searches over all keys: GPT-3 175B on 1,024 A100 and Llama-3 405B
on 16,384 H100. To hold it to one core that nobody else uses: `taskset -c 0`.
"""

import sys
from time import perf_counter, process_time

from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.screen import screen
from unisono.planner.search import search
from unisono.planner.search_arrays import SearchShared
from unisono.planner.space import Space, meshes
from unisono.planner.stack import stack
from unisono.planner.work.transformer import Transformer

GPT3 = Transformer(96, 96, 12288, 2048, 51200, 96, 4 * 12288)
LLAMA = Transformer(
    126, 128, 16384, 8192, 128256, 8, 53248, bias=False, tied=False, learned=False, gated=True, rms=True
)
QUESTIONS = (
    ("GPT-3 175B", GPT3, "dgx-a100:128", 1536, 30.0),
    ("Llama-3 405B", LLAMA, "dgx-h100:2048", 2048, 60.0),
)


def space(model: Transformer, name: str, batch: int) -> Space:
    where = cluster(name)
    return Space(model, where, stack(where.stack), batch, None, Plan.parse("precision=bf16"), all_keys=True)


def screened(within: Space) -> tuple[int, float]:
    """(plans, seconds): everything enumerated and priced, nothing pruned."""
    begun, count = perf_counter(), 0
    bench = SearchShared(within.model, within.cluster, within.stack)
    for mesh in meshes(within):
        screen(bench, mesh.plan, mesh.axes)
        count += mesh.count
    return count, perf_counter() - begun


def main() -> int:
    missed = False
    for name, model, where, batch, most in QUESTIONS:
        within = space(model, where, batch)
        count, seconds = screened(within)
        rate = count / seconds
        print(f"{name} on {within.cluster.devices:,} {within.cluster.device.name}, batch {batch}")
        print(f"  screen  {count:>12,} plans in {seconds:6.2f} s: {rate:>11,.0f} a second")
        processor = process_time()
        found = search(within)
        processor = process_time() - processor
        told = found.counts
        print(
            f"  search  {told.searched:>12,} plans in {found.seconds:6.2f} s, {processor:.2f} s of processor"
            f" (goal {most:.0f})"
        )
        print(
            f"          {told.too_large:,} pruned by memory, {told.dominated:,} by time and memory,"
            f" {told.priced:,} priced, {told.feasible:,} fit, {told.played} played"
        )
        best = found.best[0]
        print(f"  best    {best.request.plan}: {best.price.step:.4g} s, {len(found.front)} on the front")
        missed |= found.seconds > most
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
