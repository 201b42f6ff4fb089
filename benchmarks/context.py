"""A long context on one to eight ranks of cp: bytes kept for the backward pass, and gradients beside one device's.

    python benchmarks/context.py [--context 16384] [--ranks 1 2 4 8] [--check 8]

Ranks are threads of this process. The model is narrow, in float64: what is shown grows with the context alone. `kept`
are bytes of all tensors that autograd holds between the passes, on the fullest rank, parameters not counted.
"""

import argparse
import math
import time
from contextlib import nullcontext
from typing import Any

import torch

from unisono.config import DataConfig, ModelConfig, Recipe, Resolved, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.dataset import Corpus, TokenWindows
from unisono.train.step.train_step import targets_of
from unisono.verify.bounds import bounds_of
from unisono.verify.path import sizes_of
from unisono_contrib.comm import threads

VOCAB = 32


def recipe(context: int) -> Recipe:
    model = ModelConfig(
        n_layer=1,
        n_head=8,
        d_model=32,
        d_ff=32,
        context=context,
        vocab=VOCAB,
        positions="rotary",
        tie_embeddings=False,
    )
    train = TrainConfig(global_batch=1, micro_batch=1, steps=1, dtype="float64")
    return Recipe(model=model, data=DataConfig(), train=train)


def corpus_of(context: int) -> Corpus:
    tokens = torch.randint(VOCAB, (2 * context + 1,), generator=torch.Generator().manual_seed(0)).numpy()
    some = TokenWindows(tokens, context)
    return Corpus(some, some, VOCAB, 0, (context,), None, None, "", "random")


def played(
    resolved: Resolved, corpus: Corpus, backward: bool
) -> tuple[list[int], dict[str, torch.Tensor], float]:
    """(bytes that each rank keeps, gradients, seconds)."""
    plan = resolved.plan

    def live(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
        place = place_of(rank, plan.world, rank, "gloo", 3600.0)
        run = build(resolved.recipe, plan, place, corpus, Recorder(rank))
        feed, _ = feeds(resolved.recipe, plan, corpus, place.device)
        leaves = feed.fetch(0, run.leaves)
        own = {slot.live.untyped_storage().data_ptr() for slot in run.local.slots}
        kept: dict[int, torch.Tensor] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in own:
                kept.setdefault(x.untyped_storage().data_ptr(), x)
            return x

        weight = run.sync.weigh(targets_of(run, leaves))
        row = run.row if backward else run.eval_row
        with nullcontext() if backward else torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            losses = run.player.play(row, leaves, weight, None)
        nbytes = sum(x.untyped_storage().nbytes() for x in kept.values())
        kept.clear()
        feed.close()
        if not backward:
            return nbytes, {}
        run.gradients.close(losses)
        grads: Any = {slot.name: slot.master.grad.detach().clone() for slot in run.local.slots}
        return nbytes, grads

    begun = time.perf_counter()
    each = threads.run(plan.world, live, timeout=7200.0)
    return [nbytes for nbytes, _ in each], each[0][1], time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--check", type=int, default=8, help="ranks on which gradients are compared")
    args = parser.parse_args()
    corpus, given = corpus_of(args.context), recipe(args.context)
    print(f"context {args.context}, float64, ranks on threads")
    print(f"{'plan':42} {'kept, MiB a rank':>18} {'of one rank':>12} {'forward, s':>11}")
    alone = 0
    for kind in ("ring", "gather", "ulysses"):
        for ranks in args.ranks if kind == "ring" else [n for n in args.ranks if n > 1]:
            resolved = resolve(given, f"cp={ranks} cp_kind={kind}", ranks)
            kept, _, seconds = played(resolved, corpus, False)
            alone = max(kept) if ranks == 1 else alone
            share = f"1/{alone / max(kept):.2f}" if alone else ""
            print(f"{resolved.plan!s:42} {max(kept) / 2**20:18.2f} {share:>12} {seconds:11.1f}", flush=True)
    _, want, _ = played(resolve(given, "cp=1", 1), corpus, True)
    for kind in ("ring", "gather", "ulysses"):
        resolved = resolve(given, f"cp={args.check} cp_kind={kind}", args.check)
        _, got, seconds = played(resolved, corpus, True)
        error = max(((got[name] - g).abs().max() / g.abs().max()).item() for name, g in want.items())
        bound = bounds_of(resolved.plan, sizes_of(resolved, corpus)).grad
        verdict = "in bound" if error <= bound and math.isfinite(error) else "WRONG"
        print(
            f"{resolved.plan!s:42} gradients off by {error:.2g} of {bound:.2g}: {verdict} ({seconds:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
