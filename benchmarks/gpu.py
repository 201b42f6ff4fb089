"""Tokens per second and MFU on NVIDIA GPUs, beside loops written by hand with PyTorch alone.

    python benchmarks/gpu.py                          124 M and 1 B parameters, one GPU, and all of them if several
    python benchmarks/gpu.py --size 124M --seconds 60
    python benchmarks/gpu.py --all                    one table of all that a GPU has to show, see gpu_all.py
    python benchmarks/gpu.py --all --device sim       the same, rehearsed on a simulated device
    python benchmarks/gpu.py --device cpu --tiny      no GPU: the same code on a small model, its figures mean nothing

Both sides: bf16 autocast over float32 weights, fused AdamW, torch.compile, clipping, the same model, data and schedule.
The hand-written loop never reads its loss, so nothing makes it wait for the GPU. Both live in the same processes and
alternate, A B B A; the figure is the median of the rounds' ratios. MFU is the arithmetic of the matrix products,
attention counted in full (Chowdhery et al., PaLM, 2022, appendix B), over the GPU's dense bf16 peak.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer
from unisono.planner.work.transformer import transformer

# Dense bf16 peak in TFLOP/s, by what the makers' data sheets say; the first name that the device's name contains.
PEAKS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
DATA = DataConfig(source="stdlib", tokenizer="byte")  # the arithmetic does not depend on what the tokens are
VOCAB = 50304  # GPT-2's, rounded up to a multiple of 128
SIZES = {
    "124M": (ModelConfig(n_layer=12, n_head=12, d_model=768, context=1024, vocab=VOCAB), 32),
    "1B": (ModelConfig(n_layer=18, n_head=16, d_model=2048, context=1024, vocab=VOCAB), 16),
}
TINY = (ModelConfig(n_layer=2, n_head=2, d_model=64, context=32, vocab=512), 4)


def main() -> int:
    options = arguments()
    gpus = count_gpus() if options.device == "cuda" else 0
    if options.all:
        from gpu_all import table

        return table(options, gpus, lambda peer, ranks: raced(peer, ranks, options))
    if options.device == "cuda" and not gpus:
        print("no GPU here: nothing measured (--device cpu --tiny runs the same code on a processor)")
        return 0
    rows = []
    with ForkServer("race:main", path=[str(Path(__file__).parent)]) as nursery:
        for size in ["tiny"] if options.tiny else options.size:
            for peer, plan, ranks in pairs(gpus or 2, options):
                rows.append(run_pair(nursery, size, peer, plan, ranks, options))
                if not options.json:
                    print(line_of(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
    return 0


def raced(peer: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one race of the first model."""
    (plan,) = (plan for name, plan, _ in pairs(max(2, ranks), options) if name == peer)
    with ForkServer("race:main", path=[str(Path(__file__).parent)]) as nursery:
        return run_pair(nursery, "tiny" if options.tiny else options.size[0], peer, plan, ranks, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES), help="models")
    parser.add_argument("--batch", type=int, help="samples of one step on one GPU (default 32 and 16)")
    parser.add_argument("--micros", type=int, default=1, help="micro-batches of one step (default 1)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of racing, per pair (default 30)")
    parser.add_argument("--block", type=float, default=2.0, help="least seconds of one block (default 2)")
    parser.add_argument("--device", choices=["cuda", "cpu", "sim"], default="cuda")
    parser.add_argument("--all", action="store_true", help="suite, speed, memory and recovery, in one table")
    parser.add_argument("--tiny", action="store_true", help="a very small model, for trying this program")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile on both sides")
    parser.add_argument("--one", action="store_true", help="one GPU even where there are several")
    parser.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of the device, if not known here")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    if (options.device == "sim") > options.all:
        parser.error("--device sim needs --all")
    if options.device == "sim":
        options.tiny, options.seconds, options.block = True, 2.0, 0.2
    if options.device == "cpu" and (options.all or not options.tiny):
        parser.error("--device cpu needs --tiny" if not options.all else "--all is for cuda and sim")
    return options


def count_gpus() -> int:
    """GPUs that torch can use, asked of the driver's library: CUDA itself stays untouched in this process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch  # here, since --help needs none

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pairs(ranks: int, options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(hand-written loop, our plan beside it, processes)"""
    found = [("plain", "dp=1", 1)]
    if ranks > 1 and not options.one:
        found += [("ddp", f"dp={ranks}", ranks), ("fsdp", f"shard={ranks} zero=3", ranks)]
    return found


def run_pair(
    nursery: ForkServer, size: str, peer: str, plan: str, ranks: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    model, batch = TINY if size == "tiny" else SIZES[size]
    batch = options.batch or batch
    compiled = options.device == "cuda" and not options.no_compile
    train = TrainConfig(
        steps=100_000, global_batch=batch * ranks, lr=3e-4, warmup_steps=100, clip=1.0, compile=compiled
    )
    argument = {
        "recipe": Recipe(name="bench-gpu", model=model, data=DATA, train=train).model_dump_json(
            exclude_unset=True
        ),
        "plan": f"{plan} precision=bf16 micros={options.micros}",
        "peer": peer,
        "control": False,
        "ours_first": True,
        "seconds": options.seconds,
        "block_seconds": options.block,
    }
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(options.device, options.device)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    # The first steps compile, and say nothing meanwhile.
    outcome = nursery.run(argument, ranks, threads, timeout=900.0, backend=backend)
    result = outcome.results[0]
    if outcome.error is not None or result is None:
        raise SystemExit(outcome.why() or "stopped")
    return {"model": size, "ranks": ranks, "compiled": compiled, **figures(result, model, ranks, options)}


def figures(
    result: dict[str, Any], model: ModelConfig, ranks: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Ratios, medians and MFU from what the ranks saw."""
    cost = transformer(model, VOCAB).workload
    ours, peer = ([one[who][0] for one in result["rounds"]] for who in (0, 1))
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    peak = options.peak or next((tflops for name, tflops in PEAKS.items() if name in result["device"]), None)
    step_tflop = cost.step_flops * (result["tokens"] / model.context) / 1e12

    def mfu(seconds: float) -> float | None:
        return step_tflop / seconds / (peak * ranks) if peak else None

    return {
        "device": result["device"],
        "peak_tflops": peak,
        "parameters": cost.parameters,
        "ours": result["ours"],
        "peer": result["peer"],
        "ratio_vs_peer": statistics.median(ratios),
        "quartiles": [low, high],
        "rounds": len(ratios),
        "ours_tokens_per_s": result["tokens"] / statistics.median(ours),
        "peer_tokens_per_s": result["tokens"] / statistics.median(peer),
        "ours_mfu": mfu(statistics.median(ours)),
        "peer_mfu": mfu(statistics.median(peer)),
        "peak_gib": result.get("peak_gib"),
        "loss_difference": max(abs(a - b) / abs(b) for a, b in result["losses"][:20]),
    }


def line_of(row: dict[str, Any]) -> str:
    def mfu(value: float | None) -> str:
        return "no peak known" if value is None else f"MFU {value:.1%}"

    low, high = row["quartiles"]
    return (
        f"{row['model']} ({row['parameters'] / 1e6:,.0f} M parameters) on {row['ranks']} x {row['device']}:"
        f" {row['ours']} {row['ours_tokens_per_s']:,.0f} tokens/s, {mfu(row['ours_mfu'])};"
        f" {row['peer']} {row['peer_tokens_per_s']:,.0f}, {mfu(row['peer_mfu'])};"
        f" ratio {row['ratio_vs_peer']:.3f} [{low:.3f} .. {high:.3f}] over {row['rounds']} rounds;"
        f" first losses differ by {row['loss_difference']:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())
