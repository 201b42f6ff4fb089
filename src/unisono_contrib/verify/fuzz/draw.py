"""What a fuzz draws: keys of a recipe and words of a plan, from a seed and a number alone. No torch.

A dimension is one key and the values that it takes, the usual one first. Most keys keep their usual value in a case,
since mistakes need few unusual settings at once (Kuhn, Wallace & Gallo, 2004), and a case with all of them is refused.
"""

import json
import math
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config import Recipe, load
from unisono.plan.grammar import NAMED, known, member
from unisono.spec.training import OPTIMISERS
from unisono.sync import POLICIES
from unisono_contrib.verify.cover import CHUNKED, OPTIONS, RANGES, SHARDED

Keys = Mapping[str, Any]

MODELS: Sequence[Keys] = (
    {"model.kind": "gpt"},
    {"model.kind": "moe", "model.n_experts": 4, "model.top_k": 2},
    {"model.kind": "mlp", "model.hidden": (12, 10, 8), "data.source": "digits"},
    {"model.kind": "convnet", "model.channels": 4, "model.n_layer": 2, "data.source": "digits"},
    {
        "model.kind": "dlrm", "model.tables": (24, 12, 6), "model.lookups": 2, "model.d_table": 6, "model.n_dense": 4,
        "model.bottom": (8,), "model.top": (8,), "data.source": "clicks:samples=400",
    },
)  # fmt: skip
TABLES: Mapping[str, Sequence[Any]] = {"model.table_sharding": ("table", "row", "column")}
ATTENDING: Mapping[str, Sequence[Any]] = {
    "model.n_layer": (2, 4, 3, 5),
    "model.n_head": (4, 2),
    "model.n_kv_head": (None, 1, 2),
    "model.d_model": (16, 8, 24),
    "model.context": (8, 16, 12),
    "model.tie_embeddings": (True, False),
    "model.bias": (True, False),
    "model.positions": ("learned", "rotary"),
    "model.norm": ("layer", "rms"),
    "model.activation": ("gelu", "swiglu"),
    "model.dropout": (0.0, 0.2),
    "data.packing": ("auto", "documents", "none"),
}
EXPERTS: Mapping[str, Sequence[Any]] = {
    "model.n_experts": (4, 6, 3, 8),
    "model.top_k": (2, 1),
    "model.aux_loss": (0.0, 0.05),
    "model.z_loss": (0.0, 0.01),
    "model.n_shared_experts": (0, 1),
    "model.capacity_factor": (0.0, 1.0),
    "model.moe_every": (1, 2),
    "model.router": ("topk", "switch", "expert_choice"),
    "model.bias_rate": (0.0, 0.01),
    "model.d_expert": (None, 8),
}
ROUTERS: Mapping[str, Keys] = {
    "switch": {"model.top_k": 1},
    "expert_choice": {"model.aux_loss": None, "model.capacity_factor": None, "model.bias_rate": None},
}
"""What goes with a router: others are refused."""
TRAINING: Mapping[str, Sequence[Any]] = {
    "train.global_batch": (8, 12, 4, 6, 16),
    "train.micro_batch": (1, 2, 3, None),
    "train.optimizer": ("adamw", *(name for name in OPTIMISERS.names() if name != "adamw")),
    "train.clip": (0.5, 0.0, 0.05),
    "train.weight_decay": (0.1, 0.0),
    "train.warmup_steps": (1, 0),
    "train.lora_rank": (0, 2),
    "train.freeze": ((), ("blocks.0.*",)),
    "ema.decay": (None, 0.9),
}
AXES: Mapping[str, Sequence[int]] = {
    "dp": (1, 2, 3, 4), "shard": (1, 2, 3, 4), "pp": (1, 2, 3, 4), "tp": (1, 2, 4, 4), "cp": (1, 2, 4),
    "ep": (1, 2, 3, 4),
}  # fmt: skip
DIMENSIONS: tuple[str, ...] = (
    "model.kind", *ATTENDING, *(key for key in EXPERTS if key not in ATTENDING), *TABLES, *TRAINING, *AXES, "zero",
    *NAMED, "blocks",
)  # fmt: skip
"""Every key that a fuzz varies."""
STEPS = 2
OFTEN = 0.25  # how often a key leaves its usual value
MOST_RANKS = 8
LOWER: Sequence[str] = ("fp32", "bf16", "fp16", "bf16:params", "bf16:stochastic", "bf16:fp8")
"""Precisions of one recipe in eight; float64 leaves no room for luck."""
PLANS = 8  # of one recipe, which share the runs of one device


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """What is proven: a recipe's keys that are not defaults, `train.clip` → 0.5, and a plan's words, `dp` → "2"."""

    keys: Keys
    words: Mapping[str, str]

    @property
    def plan(self) -> str:
        """As a plan is written."""
        return " ".join(f"{key}={value}" for key, value in self.words.items()) or "dp=1"

    def recipe(self) -> Recipe:
        """The recipe, as the command reads it. Raises ConfigProblems."""
        flags = [(key, _text(value)) for key, value in self.keys.items()]
        return load(None, [*flags, ("plan", "dp=1"), ("launch.timeout", "120")], environ={}).recipe

    def command(self, steps: int = STEPS) -> str:
        """What proves it again."""
        flags = " ".join(f"--{key} {shlex.quote(_text(value))}" for key, value in self.keys.items())
        return f'unisono verify --plan "{self.plan}" --steps {steps} {flags}'

    def values(self) -> Iterator[tuple[str, str]]:
        """(dimension, value) of each that it has."""
        yield from ((key, str(value)) for key, value in self.keys.items() if key in DIMENSIONS)
        yield from self.words.items()


def _text(value: Any) -> str:
    """A value as a flag has it."""
    if isinstance(value, (tuple, list)):
        return json.dumps(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def documents(folder: Path) -> Path:
    """A file of short texts of very different lengths, so that micro-batches have unequal numbers of targets. Always
    the same: a command that is printed finds it again."""
    path = folder / "documents.jsonl"
    rng = random.Random(7)
    texts = ("".join(rng.choices("abcdefgh ", k=rng.choice((2, 3, 5, 9, 17)))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def draw_recipe(seed: int, number: int, texts: Path) -> dict[str, Any]:
    """Keys of the recipe with this number. texts: what `documents` wrote."""
    rng = random.Random(f"recipe {seed} {number}")
    keys: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "train.dtype": "float32" if _lower(seed, number) else "float64",
        "train.lr": 0.01,
        "train.steps": 8,
    }
    model = rng.choices(MODELS, weights=(6, 4, 1, 1, 1))[0]
    keys |= model
    attends = model["model.kind"] in ("gpt", "moe")
    if attends:
        keys |= _drawn(
            rng, ATTENDING, always=("model.n_layer", "model.n_head", "model.d_model", "model.context")
        )
        if keys.get("data.packing") is not None:
            keys["data.source"] = f"jsonl:{texts}"
    if model["model.kind"] == "moe":
        keys |= _drawn(rng, EXPERTS, always=("model.n_experts",))
        keys |= ROUTERS.get(keys.get("model.router", ""), {})
    if model["model.kind"] == "dlrm":
        keys |= _drawn(rng, TABLES, always=())
    keys |= _drawn(rng, TRAINING, always=("train.global_batch", "train.micro_batch", "train.clip"))
    return {key: value for key, value in keys.items() if value is not None}


def _lower(seed: int, number: int) -> str:
    """The precision of the recipe with this number, where it is not float64: all its plans have it."""
    rng = random.Random(f"precision {seed} {number}")
    return rng.choice(LOWER) if rng.random() < 0.125 else ""


def _drawn(rng: random.Random, choices: Mapping[str, Sequence[Any]], always: Sequence[str]) -> dict[str, Any]:
    drawn = {}
    for key, (usual, *others) in choices.items():
        if others and rng.random() < OFTEN:
            drawn[key] = rng.choice(others)
        elif key in always:
            drawn[key] = usual
    return drawn


def draw_plan(seed: int, number: int, turn: int, keys: Keys) -> dict[str, str]:
    """Words of a plan on 2 to 8 ranks, which the recipe may refuse; others at each `turn`."""
    rng = random.Random(f"plan {seed} {number} {turn}")
    words: dict[str, str] = {}
    world, most = 1, rng.choices((2, 4, MOST_RANKS), weights=(3, 4, 1))[0]
    axes = [axis for axis in AXES if axis != "ep"]
    rng.shuffle(axes)
    for axis in axes[: rng.choices((1, 2, 3), weights=(3, 4, 2))[0]]:
        sizes = [size for size in AXES[axis] if 1 < size <= most // world]
        if sizes:
            words[axis] = str(rng.choice(sizes))
            world *= int(words[axis])
    if keys["model.kind"] in ("moe", "dlrm") and rng.random() < 0.6:
        inside = math.prod(
            int(words.get(axis, "1")) for axis in ("shard", "cp", "tp")
        )  # ranks that it takes again
        fit = [size for size in AXES["ep"] if size > 1 and inside % size == 0]
        words |= {"ep": str(rng.choice(fit))} if fit else {}
    if "tp" in words and rng.random() < (2 * OFTEN if words["tp"] == "4" else OFTEN):
        words["tp"] = rng.choice([f"{words['tp']}:{CHUNKED}", *(["2x2"] if words["tp"] == "4" else [])])
    idle = {"schedule": "pp", "cp_kind": "cp", "codec": "dp", "collective": "dp"}
    for key, values in _named(words).items():
        needs = idle.get(key)
        likely = 0.5 if needs else OFTEN
        if values and (needs is None or needs in words) and rng.random() < likely:
            words[key] = rng.choice(values)
    if "shard" in words:
        words["zero"] = rng.choice(("3", "1", "2", "3:wire=int8,prefetch=2"))
    if (
        keys["model.kind"] in ("gpt", "moe")
        and not {"recompute", "offload"} & words.keys()
        and rng.random() < 0.1
    ):
        words["blocks"] = rng.choice(RANGES)
    if precision := _lower(seed, number):
        words["precision"] = precision
    return words


def _named(words: Mapping[str, str]) -> dict[str, list[str]]:
    """Values of the keys with names, but for the usual one."""
    choices = {}
    for key in NAMED:
        if key == "precision":  # of the recipe
            continue
        names = [name for name in known(key) if key != "sync" or POLICIES.find(name).equal]
        if key == "collective":
            names = [name for name in names if member(key, name).threaded]
        values = [f"{name}:{OPTIONS[name]}" if name in OPTIONS else name for name in names]
        # One order of all sums has more to go wrong than any other policy, and is drawn three times as often.
        choices[key] = values + (2 * ["canonical"] + 3 * [SHARDED] if key == "sync" else [])
    return choices
