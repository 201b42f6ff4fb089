"""Published measurements as rows that the planner can price; shared by the tests and by benchmarks/accuracy.py.

The files carry their sources and licences in their first lines. They are the rows that constants may be fitted to;
each file is read once.
"""

import csv
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from benchmarks.fitting.calibrate import MeasuredStep
from benchmarks.fitting.fits import MeasuredProduct
from unisono.plan import Plan
from unisono.planner import memory, states
from unisono.planner.clusters import cluster, device
from unisono.planner.timetables import in_flight
from unisono.planner.work.megatron_activations import block_bytes
from unisono.planner.work.transformer import Transformer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "planner"
# MPT's sizes by name: layers, heads, width (MosaicML, llm-foundry, 2023).
MPT = {
    "125m": (12, 12, 768), "350m": (24, 16, 1024), "760m": (24, 12, 1536), "1b": (24, 16, 2048),
    "3b": (32, 20, 2560), "7b": (32, 32, 4096), "13b": (40, 40, 5120), "30b": (48, 56, 7168),
}  # fmt: skip


def table(name: str) -> list[dict[str, str]]:
    with (FIXTURES / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def gpt(
    layers: int,
    heads: int,
    width: int,
    context: int,
    vocab: int = 51200,
    noisy: bool = True,
    bias: bool = True,
) -> Transformer:
    """A GPT of the usual proportions. vocab: that of GPT-2, rounded up as Megatron does."""
    return Transformer(layers, heads, width, context, vocab, heads, 4 * width, noisy=noisy, bias=bias)


@cache
def korthikanti() -> list[MeasuredStep]:
    """Table 5: 22B to 1T on Selene, full recomputation, and selective with sequence parallelism."""
    rows = []
    for r in table("korthikanti_table5_iteration.csv"):
        model = gpt(int(r["layers"]), int(r["heads"]), int(r["hidden"]), 2048)
        v, micro = int(r["interleave"]), int(r["micro_batch"])
        schedule = "1f1b" if v == 1 else f"interleaved:v={v}"
        for mode, column, shared in (
            ("full", "iter_s_full", False),
            ("selective", "iter_s_selective_sp", True),
        ):
            plan = Plan(tp=int(r["tp"]), pp=int(r["pp"]), schedule=schedule, precision="fp16", recompute=mode)
            rows.append(
                MeasuredStep(model, plan, cluster(f"dgx-a100:{int(r['gpus']) // 8}"), micro,
                    int(r["global_batch"]) // micro, float(r[column]), r["model"],
                    (("sequence_parallel", shared),))
            )  # fmt: skip
    return rows


def _vtrain(name: str) -> list[MeasuredStep]:
    rows = []
    for r in table(name):
        model = gpt(int(r["layers"]), int(r["heads"]), int(r["hidden"]), int(r["seq_len"]))
        plan = Plan(dp=int(r["dp"]), tp=int(r["tp"]), pp=int(r["pp"]), precision="fp16", recompute="full")
        nodes, micro, batch = max(1, int(r["gpus"]) // 8), int(r["micro_batch"]), int(r["global_batch"])
        group = " ".join(r[key] for key in ("hidden", "layers", "gpus", "global_batch"))
        rows.append(
            MeasuredStep(model, plan, cluster(f"a100-800g:{nodes}"), micro, batch // micro // plan.dp,
                float(r["iter_ms"]) / 1e3, group)
        )  # fmt: skip
    return rows


@cache
def vtrain_multi() -> list[MeasuredStep]:
    """3.6B and 39.1B on 64 and 512 A100."""
    return _vtrain("vtrain_multi_calibration.csv")


@cache
def vtrain_single() -> list[MeasuredStep]:
    """250 small models and plans on one node, most of them bound by the host."""
    return _vtrain("vtrain_single_calibration.csv")


def _mosaic(name: str, where: str, *habits: tuple[str, float]) -> list[MeasuredStep]:
    rows = []
    for r in table(name):
        model = gpt(*MPT[r["model"]], int(r["seq_len"]), vocab=50368, noisy=False, bias=False)
        plan = Plan(
            shard=int(r["gpus"]), zero=3 if r["sharding"] == "FULL_SHARD" else 2, precision="bf16",
            recompute="full" if r["act_ckpt"] == "True" else "none",
        )  # fmt: skip
        seconds = float(r["global_batch"]) * float(r["seq_len"]) / float(r["tokens_s"])
        rows.append(
            MeasuredStep(model, plan, cluster(where), int(r["micro_batch"]), int(r["grad_accum"]), seconds,
                r["model"], habits)
        )  # fmt: skip
    return rows


@cache
def mosaic() -> list[MeasuredStep]:
    """MPT under FSDP on eight A100 of 40 GB."""
    return _mosaic("mosaic_llmfoundry_fsdp.csv", "a100-40gb")


@cache
def mosaic_h100() -> list[MeasuredStep]:
    """The same program on eight H100, where gradients cross in fp32 (its precision DEFAULT)."""
    return _mosaic("mosaic_llmfoundry_h100_one_node.csv", "dgx-h100", ("reduce_bytes", 4))


@cache
def sc21() -> list[MeasuredStep]:
    """Two rows of Table 1, not fitted to: 18.4B and 145.6B on Selene, a year older than Korthikanti's."""
    rows = []
    for r in table("sc21_table1.csv"):
        v, pp, micro, dp = int(r["vpp_chunks"]), int(r["pp"]), int(r["micro_batch"]), int(r["dp"])
        schedule = "1f1b" if v == 1 or pp == 1 else f"interleaved:v={v}"
        plan = Plan(dp=dp, tp=int(r["tp"]), pp=pp, schedule=schedule, precision="fp16", recompute="full")
        rows.append(
            MeasuredStep(gpt(int(r["layers"]), int(r["heads"]), int(r["hidden"]), 2048), plan,
                cluster(f"dgx-a100:{int(r['gpus']) // 8}"), micro, int(r["global_batch"]) // dp // micro,
                float(r["step_time_s_derived"]), r["params_b"], (("sequence_parallel", False),))
        )  # fmt: skip
    return rows


@cache
def megatron_h100() -> list[MeasuredStep]:
    """Three rows of the Megatron-LM read-me's table of 2024; micro-batches and chunks are not printed.

    Assumed: micro-batch 2 without a pipeline; 1 and four chunks a rank with one; Megatron's distributed optimiser.
    The assumptions were made with the rows in view, so this set says little; it is shown because it is weak.
    """
    rows = []
    for r in table("megatron_core_h100_2024.csv"):
        model = gpt(int(r["layers"]), int(r["heads"]), int(r["hidden"]), 4096, vocab=131072, noisy=False)
        dp, pp = int(r["dp"]), int(r["pp"])
        micro = 2 if pp == 1 else 1
        schedule = "interleaved:v=4" if pp > 1 else "1f1b"
        plan = Plan(shard=dp, zero=1, tp=int(r["tp"]), pp=pp, schedule=schedule, precision="bf16")
        batch = int(r["global_batch"])
        seconds = model.step_flops(batch) / (float(r["gpus"]) * float(r["tflops_per_gpu"]) * 1e12)
        rows.append(
            MeasuredStep(model, plan, cluster(f"dgx-h100:{int(r['gpus']) // 8}"), micro, batch // dp // micro, seconds,
                r["params_b"])
        )  # fmt: skip
    return rows


@cache
def products() -> list[MeasuredProduct]:
    """150 products measured on an A100 PCIe (SimuMax)."""
    rows = []
    for r in table("simumax_a100_kernels.csv"):
        if r["op"] == "matmul":
            b, m, k, n = (int(number) for number in re.findall(r"[bmkn]=(\d+)", r["shape"]))
            flops = 2.0 * b * m * k * n
            rows.append(
                MeasuredProduct(device("a100-80gb"), m, k, n, b, flops / (312e12 * float(r["efficiency"])))
            )
    return rows


def attention_shares() -> list[float]:
    """Of peak, the masked half counted: fused attention on an A100 PCIe (SimuMax)."""
    return [float(r["efficiency"]) for r in table("simumax_a100_kernels.csv") if r["op"].startswith("sdp")]


def allocators() -> list[tuple[float, float]]:
    """(asked for, held) of PyTorch's caching allocator at its peak, MiB, as runs of Megatron-LM print it."""
    return [(float(r["max_allocated"]), float(r["max_reserved"])) for r in table("allocator_logs.csv")]


def all_reduces(gpu: str) -> list[tuple[int, float, float]]:
    """(members, bytes, seconds) of NCCL's all-reduce in one node (vTrain)."""
    return [
        (int(r["ranks"]), float(r["bytes"]), float(r["time_ns"]) / 1e9)
        for r in table("vtrain_nccl_allreduce.csv")
        if r["gpu"] == gpu
    ]


# Set: its rows, the stack that prices it, the constants that were fitted to it.
SETS: dict[str, tuple[Callable[[], list[MeasuredStep]], str, tuple[str, ...]]] = {
    "korthikanti table 5": (korthikanti, "megatron-2022", ("matmul", "tp_bus", "p2p")),
    "vtrain single-node": (
        vtrain_single, "megatron-deepspeed-node",
        ("matmul", "elementwise", "launch", "member", "micro"),
    ),
    "vtrain multi-node": (vtrain_multi, "megatron-deepspeed", ("matmul", "gap", "step")),
    "mosaic fsdp": (mosaic, "llm-foundry", ("matmul", "attention", "gap")),
    "mosaic fsdp h100": (mosaic_h100, "llm-foundry", ("matmul", "attention")),
    "sc21 table 1": (sc21, "megatron-2021", ()),
    "megatron h100": (megatron_h100, "megatron-2024", ("tp_hidden",)),
}  # fmt: skip


# A set, which of its rows are fitted to; the others are further away in what the text says.
BEYOND: dict[str, tuple[str, Callable[[MeasuredStep], bool]]] = {
    "mosaic: width to 1536, then 5120": ("mosaic fsdp", lambda row: row.model.d_model <= 1536),
    "mosaic: width to 1024, then 5120": ("mosaic fsdp", lambda row: row.model.d_model <= 1024),
    "mosaic: context to 2K, then 32K": ("mosaic fsdp", lambda row: row.model.context <= 2048),
    "mosaic: context to 1K, then 32K": ("mosaic fsdp", lambda row: row.model.context <= 1024),
    "vtrain: 3.6B on 64, then 39B on 512": ("vtrain multi-node", lambda row: row.model.d_model <= 3072),
    "vtrain: 39B on 512, then 3.6B on 64": ("vtrain multi-node", lambda row: row.model.d_model > 3072),
    "vtrain: width 1024, then 2048": ("vtrain single-node", lambda row: row.model.d_model <= 1024),
    "vtrain: 2 and 4 devices, then 8": ("vtrain single-node", lambda row: row.plan.world < 8),
    "vtrain: without tp, then with it": ("vtrain single-node", lambda row: row.plan.tp == 1),
    "vtrain: without pp, then with it": ("vtrain single-node", lambda row: row.plan.pp == 1),
    "korthikanti: to 64, then 512 devices": ("korthikanti table 5", lambda row: row.plan.world <= 64),
}


# Layers, heads, width, tp, pp, micro-batch, chunks: Korthikanti et al., 2022, table 3.
KORTHIKANTI = {
    "22B": (48, 64, 6144, 8, 1, 4, 1), "175B": (96, 96, 12288, 8, 8, 1, 3),
    "530B": (105, 128, 20480, 8, 35, 1, 3), "1T": (128, 160, 25600, 8, 64, 1, 1),
}  # fmt: skip
# Figure: whether with sequence parallelism, what is computed again.
MODES = {
    "none": (False, "none"), "sequence": (True, "none"), "selective": (False, "selective"),
    "selective_sp": (True, "selective"), "full": (False, "full"),
}  # fmt: skip
ZERO_SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


def korthikanti_memory(name: str, quantity: str) -> float:
    """What the planner says to one line of the figures: GiB, or per cent of the baseline."""
    layers, heads, width, tp, pp, micro, v = KORTHIKANTI[name]
    model = gpt(layers, heads, width, 2048)
    plan = Plan(tp=tp, pp=pp, precision="fp16", schedule="1f1b" if v == 1 else f"interleaved:v={v}")

    def kept(mode: str) -> float:
        shared, recompute = MODES[mode]
        return block_bytes(
            model, micro_batch=micro, tp=tp, sequence_parallel=shared, fused=False, recompute=recompute
        )

    if quantity == "params_optimizer_gib":
        blocks = memory.share_of(model, plan, 0, False).blocks
        return sum(states.states(blocks, shard=1, zero=3, precision="fp16", grad_bytes=4)) / 2**30
    share = quantity.removeprefix("activation_pct_of_tp_baseline_")
    if share != quantity:
        return 100.0 * kept(share) / kept("none")
    held = in_flight(plan.schedule, 0, pp, 10**6) * layers / pp
    return held * kept(quantity.removeprefix("activations_").removesuffix("_gib")) / 2**30


def zero_states(row: dict[str, str], zero: int) -> float:
    """GB of a rank's weights, gradients and optimiser in a row of ZeRO's table 1."""
    size, ranks = ZERO_SIZES[row["model"]], int(row["dp_degree"])
    return sum(states.states(size, shard=ranks, zero=zero, precision="fp16", grad_bytes=2)) / 1e9


def zero_rounded(value: float, printed: str) -> float:
    """The value with the digits that the table prints, cut or rounded: the table does both."""
    digits = len(printed.partition(".")[2])
    cut = int(value * 10**digits + 1e-9) / 10**digits
    return cut if cut == float(printed) else round(value + 1e-9, digits)


def memory_pairs() -> dict[str, list[tuple[float, float]]]:
    """(ours, theirs) of the memory sets."""
    zero = [
        (zero_rounded(zero_states(row, stage), row[f"stage{stage}_gb"]), float(row[f"stage{stage}_gb"]))
        for row in table("zero_table1_memory.csv")
        for stage in (1, 2, 3)
    ]
    figures = [
        (korthikanti_memory(row["model"], row["quantity"]), float(row["value"]))
        for row in table("korthikanti_memory_fig1_fig7.csv")
    ]
    return {"zero table 1, printed digits": zero, "korthikanti figures 1 and 7": figures}
