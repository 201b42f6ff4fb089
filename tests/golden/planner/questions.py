"""Questions whose prices and verdicts are frozen, by a text that says each: model|cluster|stack|plan|micro-batch|micros.

`python -m tests.golden.planner.questions` prices anew what `intended.txt` lists above its mark, and refuses where
anything else moved. After that its lines go below the mark.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from random import Random

from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.planner.work.experts import Experts, Latent
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UnisonoError
from unisono.spec.workload import Product, Tables, Workload, WorkPart
from unisono_contrib.planner.mixture import mixture
from unisono_contrib.planner.studies.mixtures import everywhere

HERE = Path(__file__).parent
PRICES, INTENDED = HERE / "prices.json.gz", HERE / "intended.txt"
CLOSE = 1e-9


def _gpt(n_layer: int, n_head: int, d_model: int, context: int, vocab: int, **other: object) -> Transformer:
    usual = {"kv_heads": n_head, "d_ff": 4 * d_model} | other
    return Transformer(n_layer, n_head, d_model, context, vocab, **usual)  # pyright: ignore[reportArgumentType]


_LLAMA = {"kv_heads": 8, "bias": False, "tied": False, "learned": False, "gated": True, "rms": True}
_PARTS = tuple(
    WorkPart(
        f"part.{n}", 9 * width * width * 4, 2 * side * side * width * 9 * width * 4, 12 * side * side * width,
        side * side * width, products=(Product(side * side, 9 * width, 4 * width, 1, side * side * width),),
        moved=40 * side * side * width, kernels=9 + n,
    )
    for n, (side, width) in enumerate([(56, 64)] * 3 + [(28, 128)] * 4 + [(14, 256)] * 6 + [(7, 512)] * 3)
)  # fmt: skip
_STEM = WorkPart("stem", 9408, 2 * 112 * 112 * 147 * 64, 112 * 112 * 64 * 3, 56 * 56 * 64,
                 products=(Product(112 * 112, 147, 64, 1, 224 * 224 * 3),), moved=112 * 112 * 64 * 6, kernels=5)  # fmt: skip
_HEAD = WorkPart(
    "head", 512 * 1000, 2 * 512 * 1000, 2512, 1000, products=(Product(1, 512, 1000),), moved=5000, kernels=6
)
_TABLES = WorkPart("tables", 26 * 10**6 * 64, 0, 26 * 64, 26 * 64, moved=26 * 64 * 3, kernels=26,
                   tables=Tables(26 * 10**6 * 64, 26 * 64, 26 * 64))  # fmt: skip
_DENSE = tuple(
    WorkPart(f"dense.{n}", 1024 * 1025, 2 * 1024 * 1024, 3 * 1024, 1024, products=(Product(1, 1024, 1024),),
             moved=3072, kernels=3)
    for n in range(6)
)  # fmt: skip
_LAST = WorkPart("head", 1025, 2048, 1026, 1, products=(Product(1, 1024, 1),), moved=10, kernels=4)

MODELS: dict[str, Transformer | Network] = {
    "gpt-124m": _gpt(12, 12, 768, 1024, 50304),
    "gpt-noisy": _gpt(24, 16, 2048, 2048, 51200, noisy=True),
    "gpt-39b": _gpt(48, 64, 8192, 2048, 51200, noisy=True),
    "llama-8b": _gpt(32, 32, 4096, 8192, 128256, d_ff=14336, **_LLAMA),
    "llama-1b": _gpt(16, 16, 2048, 4096, 32000, d_ff=5632, states=1, **_LLAMA),
    "moe": _gpt(24, 16, 2048, 4096, 32000, d_ff=5632, experts=Experts(16, 2, 1408, 1408, every=2, dense=1, load=1.3),
                **_LLAMA),
    "latent": _gpt(16, 16, 2048, 4096, 102400, d_ff=10944, latent=Latent(1536, 512, 128, 64, 128),
                   experts=Experts(64, 6, 1408, 2816, dense=1, capacity=1.25), **{**_LLAMA, "kv_heads": 16}),
    "resnet": Network(Workload((_STEM, *_PARTS, _HEAD)), by_weights=True),
    "tables": Network(Workload((_TABLES, *_DENSE, _LAST)), states=1),
    "small": _gpt(4, 4, 128, 64, 65),
    "small-noisy": _gpt(4, 4, 128, 64, 65, noisy=True, bias=False),
    "small-llama": _gpt(8, 8, 256, 128, 256, d_ff=688, **{**_LLAMA, "kv_heads": 4}),
    "small-sgd": _gpt(6, 4, 128, 64, 65, states=1),
    "small-net": Network(Workload((_STEM, *_PARTS[:6], _HEAD))),
}  # fmt: skip
_SMALL = tuple(name for name in MODELS if name.startswith("small"))
_LARGE = tuple(name for name in MODELS if name not in _SMALL)
_CLUSTERS = ("dgx-a100:1", "dgx-a100:4", "dgx-v100:2", "dgx-h100:2", "dgx-h100:8", "a100-pcie:4", "h100-roce:4",
             "dgx-b200:2", "tpu-v4:16", "dgx-2:1", "laptop:4")  # fmt: skip
_STACKS = (
    "plain",
    "plain-cpu",
    "megatron-2022",
    "megatron-2021",
    "megatron-deepspeed",
    "llm-foundry",
    "megatron-2024",
)
_MIXTURES = ("dgx-a100:2+dgx-v100:2", "dgx-h100:1+dgx-a100:3")
_SCHEDULES = (
    "1f1b",
    "1f1b",
    "gpipe",
    "interleaved:v=2",
    "looped_bfs:v=2",
    "zb1p",
    "zb2p",
    "zbv",
    "dualpipe",
    "dualpipev",
)
_SYNCS = ("canonical", "delayed", "local_sgd:h=16", "diloco:h=50", "gossip", "quorum:k=2", "ssp:s=2", "async", "hogwild",
          "adaptive")  # fmt: skip
_CODECS = ("cast:bf16", "int8", "qsgd", "qsgd:levels=7", "sign+ef", "ternary", "topk:ratio=0.01+ef", "threshold",
           "randomk:ratio=0.1", "block+ef", "powersgd:r=4+ef")  # fmt: skip
_COLLECTIVES = ("ring", "tree", "halving_doubling", "hierarchical", "torus")


def _dealt(draw: Random, devices: int, axes: tuple[str, ...]) -> dict[str, int]:
    """Devices over some axes, prime by prime."""
    sizes, left = dict.fromkeys(axes, 1), devices
    chosen = draw.sample(axes, draw.randint(1, min(4, len(axes))))
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        sizes[draw.choice(chosen)] *= prime
        left //= prime
    return sizes


def _plan(draw: Random, model: Transformer | Network, devices: int) -> str | None:
    """A plan that this model takes, or None."""
    axes = ("dp", "shard", "pp", "tp", "cp") if isinstance(model, Transformer) else ("dp", "shard", "pp")
    sizes = _dealt(draw, devices, axes)
    if isinstance(model, Transformer):
        heads, tp = model.n_head, sizes["tp"]
        if heads % (tp * sizes.get("cp", 1)) or model.kv_heads % tp or tp > 16:
            return None
    if sizes["pp"] > model.n_layer:
        return None
    words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    if sizes["shard"] > 1:
        words.append(f"zero={draw.randint(1, 3)}")
    if sizes["pp"] > 1:
        words.append(f"schedule={draw.choice(_SCHEDULES)}")
    if sizes.get("cp", 1) > 1 and draw.random() < 0.4 and model.kv_heads % (sizes["tp"] * sizes["cp"]) == 0:
        words.append("cp_kind=ulysses")
    inner = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes["shard"]
    if isinstance(model, Transformer) and model.experts and inner > 1:
        words.append(
            f"ep={draw.choice([n for n in (1, 2, 4, 8, 16) if inner % n == 0 and model.experts.count % n == 0])}"
        )
    if model is MODELS["tables"] and sizes["shard"] > 1:
        words.append(f"ep={draw.choice([n for n in (1, 2, 4) if sizes['shard'] % n == 0])}")
    words.append(f"precision={draw.choice(['bf16', 'bf16', 'fp32'])}")
    if draw.random() < 0.45:
        words.append(f"recompute={draw.choice(['full', 'auto', 'selective'])}")
    if sizes["dp"] > 1 and draw.random() < 0.45:
        kind = draw.choice(["sync", "codec", "collective", "both"])
        words += [f"sync={draw.choice(_SYNCS)}"] * (kind in ("sync", "both"))
        words += [f"codec={draw.choice(_CODECS)}"] * (kind in ("codec", "both"))
        words += [f"collective={draw.choice(_COLLECTIVES)}"] * (kind == "collective")
    return " ".join(words)


def drawn(count: int, seed: int = 15) -> Iterator[str]:
    """Questions at random, each once, most on devices of one kind, some on mixtures."""
    draw, seen = Random(seed), set[str]()
    while len(seen) < count:
        kind = draw.choices(("devices", "mixture"), (0.93, 0.07))[0]
        name = draw.choice(_LARGE)
        at = draw.choice(_CLUSTERS if kind == "devices" else _MIXTURES)
        model = MODELS[name]
        if kind == "mixture" and not isinstance(model, Transformer):
            continue
        text = _plan(draw, model, 32 if kind == "mixture" else cluster(at).devices)
        if text is None:
            continue
        if kind == "mixture" and any(word in text for word in ("sync", "codec", "dualpipe")):
            continue
        plan = Plan.parse(text)
        micros = draw.choice((1, 2, 3, 4, 8, 16)) * (plan.pp if draw.random() < 0.8 else 1)
        made = draw.choice(_STACKS)
        one = f"{name}|{at}|{made}|{plan}|{draw.choice((1, 1, 2, 3, 4, 8))}|{micros}"
        if one not in seen and prod((plan.pp, micros)) <= 2048:
            seen.add(one)
            yield one


def answer(text: str) -> list[float | str]:
    """What is frozen of one question: words of the verdict, seconds, bytes; or the code of a refusal."""
    name, at, made, said, micro_batch, micros = text.split("|")
    given = (MODELS[name], Plan.parse(said), stack(made), int(micro_batch), int(micros))
    try:
        return _mixed(at, *given) if "+" in at else _alone(cluster(at), *given)
    except UnisonoError as error:
        return [error.code]


def _alone(where: Cluster, model, plan: Plan, made, micro_batch: int, micros: int) -> list[float | str]:
    ask = PlanRequest(model, plan, where, made, micro_batch, micros)
    if not ask.served:
        return ["unserved"]
    got = simulate(ask)
    price, memory = got.price, got.verdict.memory
    found: list[float | str] = [
        price.step, price.arithmetic, price.kernels, price.host, price.idle, price.uneven, price.optimizer, price.fixed,
        price.recompute, got.bubble, memory.params, memory.grads, memory.optim, memory.activations, memory.communication,
        memory.total, got.verdict.capacity, float(got.verdict.row),
        "fits" if got.verdict.fits else "short",
    ]  # fmt: skip
    for axis, traffic in price.comm.items():
        found += [axis, traffic.bytes, traffic.seconds, traffic.exposed]
    return found


def _mixed(at: str, model, plan: Plan, made, micro_batch: int, micros: int) -> list[float | str]:
    where = mixture(at)
    best = everywhere(where, PlanRequest(model, plan, where.whole(), made, micro_batch, micros))[0].answer
    return [best.price.step, best.price.idle, best.price.optimizer, best.bubble, best.verdict.short,
            best.verdict.memory.total]  # fmt: skip


def differs(was: list[float | str], now: list[float | str]) -> bool:
    """Whether anything is further apart than rounding makes it; times under a picosecond of a step of seconds are none."""
    if len(was) != len(now):
        return True
    scale = was[0] if isinstance(was[0], float) else 1.0
    for one, other in zip(was, now, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                return True
        elif one != other and abs(one - other) > CLOSE * max(
            abs(one), abs(other), 1e-3 * scale if abs(one) < scale else 0
        ):
            return True
    return False


def frozen() -> dict[str, list[float | str]]:
    return json.loads(gzip.decompress(PRICES.read_bytes()))


def intended(settled: bool = False) -> list[tuple[str, str]]:
    """(pattern of questions, why they cost something else than before). settled: those that were frozen since."""
    part = INTENDED.read_text().partition("# --- frozen")[2 if settled else 0]
    lines = [line for line in part.splitlines()[settled:] if line.strip() and not line.startswith("#")]
    return [(pattern.strip(), why.strip()) for pattern, _, why in (line.partition("  ") for line in lines)]


def excused(text: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern, _ in intended())


def rounded(found: list[float | str]) -> list[float | str]:
    return [one if isinstance(one, str) else float(f"{one:.11g}") for one in found]


def _write(prices: dict[str, list[float | str]]) -> None:
    text = json.dumps(prices, separators=(",", ":")).replace("],", "],\n")
    PRICES.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> int:
    if not PRICES.exists():
        _write({text: rounded(answer(text)) for text in drawn(1700)})
        return 0
    prices, moved, unexcused = frozen(), 0, list[str]()
    for text, was in prices.items():
        now = rounded(answer(text))
        if differs(was, now):
            moved += 1
            if not excused(text):
                unexcused.append(text)
            prices[text] = now
    for text in unexcused[:40]:
        sys.stdout.write(f"{text}\n")
    sys.stdout.write(f"{moved} of {len(prices)} moved, {len(unexcused)} of them listed nowhere\n")
    if unexcused:
        return 1
    _write(prices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
