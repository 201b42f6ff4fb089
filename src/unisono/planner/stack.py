"""What software makes of a device: efficiencies, overheads and habits, as data, fitted to the rows that each names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from unisono.plan.grammar import meant
from unisono.planner.source import Source
from unisono.planner.toml_tables import Table, bundled, from_file, inherited, is_file, likeness
from unisono.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class FittedRange:
    """What the rows that a stack was fitted to (of our own, held beside) have between them: devices by name; least and
    most ranks, width of the model, context; techniques, as `trust.techniques` names them."""

    devices: tuple[str, ...]
    ranks: tuple[int, int]
    width: tuple[int, int]
    context: tuple[int, int]
    techniques: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedRows:
    """Rows that are alike, and the mean relative error of a step's seconds on them; None: of a stack that has none."""

    error: float
    seen: FittedRange | None


@dataclass(frozen=True, slots=True)
class Stack:
    """Constants of one piece of training software on one generation of devices.

    Habits: fused_attention (scores are never written), fused_loss (softmax of the logits in one kernel),
    sequence_parallel (norms and dropout are dealt over tp), scatter_gather (stages send 1/tp each), autograd (what is
    kept, and in which dtype, is as in our own runs rather than as with Megatron's fused kernels), composed (RMS norms
    are several kernels), grad_bytes (an element of the gradients that add up), reduce_bytes (an element as it crosses
    dp), balanced (stages are cut by cost, as `parallel.cut` does; evenly otherwise).

    Efficiencies, of peak or of a link's bus: matmul (large products), attention (fused), elementwise (memory
    bandwidth), tp_bus, dp_bus and p2p (as tp_bus where a stack does not say), host_link. depth: elements of a
    product's inner dimension at which half of its rate is gone. wave: exponent of the share of multiprocessors that the
    last wave of tiles fills. matmul, attention and depth are those of an A100: a device says how much more or less it
    keeps up.

    Hidden shares: tp_hidden of the backward pass's tp collectives, dp_hidden of the gradients' on dp.

    Seconds: launch (host, per kernel), gap (device, lost at each kernel of a block: ramp and tail), collective (added
    per tp collective), member (to that, for each of its ranks: the last to arrive is
    awaited), micro (per micro-batch), step (per step).
    slack: of what is allocated, what the allocator holds beside it. error: mean relative error of a step's seconds on
    rows that were held out. seen: what those rows were like, None where there were none. families: the same of kinds of
    rows that are apart, where there are several.

    The defaults here lose nothing; every built-in stack says its own.
    """

    name: str = "plain"
    fused_attention: bool = True
    fused_loss: bool = True
    sequence_parallel: bool = True
    scatter_gather: bool = True
    balanced: bool = True
    autograd: bool = False
    composed: bool = False
    grad_bytes: int = 4
    reduce_bytes: int = 4
    matmul: float = 1.0
    depth: float = 0.0
    wave: float = 0.0
    attention: float = 1.0
    elementwise: float = 1.0
    tp_bus: float = 1.0
    dp_bus: float = 1.0
    p2p: float = 1.0
    host_link: float = 1.0
    tp_hidden: float = 0.0
    dp_hidden: float = 0.0
    launch: float = 0.0
    gap: float = 0.0
    collective: float = 0.0
    member: float = 0.0
    micro: float = 0.0
    step: float = 0.0
    slack: float = 0.0
    error: float = 0.0
    seen: FittedRange | None = None
    families: tuple[FittedRows, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)


FLAGS = (
    "fused_attention", "fused_loss", "sequence_parallel", "scatter_gather", "balanced", "autograd", "composed",
)  # fmt: skip
COUNTS = ("grad_bytes", "reduce_bytes")
_RATES = ("matmul", "attention", "elementwise", "tp_bus", "dp_bus", "p2p", "host_link")
_SECONDS_US = ("launch", "gap", "collective", "member", "micro", "step")
NUMBERS = tuple(
    f.name for f in fields(Stack) if f.name not in (*FLAGS, *COUNTS, "name", "seen", "families", "sources")
)
_KEYS = (*FLAGS, *COUNTS, *NUMBERS, "seen", "families", "like")


@cache
def names() -> tuple[str, ...]:
    """Built-in stacks."""
    return tuple(bundled("stacks.toml").values)


@cache
def stack(name: str) -> Stack:
    """A built-in stack, or a user's own file. Raises UsageError."""
    if is_file(name):
        return read_stack(Path(name))[0]
    table = bundled("stacks.toml")
    if name not in table.values:
        what = f"no software stack is called {name!r}{meant(name, names())}"
        raise UsageError(what, where="--stack", fix=f"one of: {' '.join(names())}, or FILE.toml", code="C21")
    return _read(inherited(table, name), name)


def read_stack(path: Path) -> tuple[Stack, Table | None]:
    """(the stack of a user's file: one that it is `like`, where it says nothing else; its table [run]). Raises
    UsageError with file and line."""
    user_table = from_file(path)
    user_table.known((*_KEYS, "factor", "run"))
    table = likeness(user_table, bundled("stacks.toml"), "stack")
    constants = {key: value for key, value in table.values.items() if key not in ("factor", "run")}
    software = _read(replace(table, values=constants), path.stem)
    if "factor" not in user_table.values:
        return software, user_table.table("run") if "run" in user_table.values else None
    factor = user_table.number("factor")[0]
    if not factor or "run" in user_table.values:
        raise user_table.wrong(
            "factor is above 0 and takes the place of [run]", "factor", "factor = 1.2, or [run]"
        )
    return scaled(software, factor), None


def scaled(software: Stack, factor: float) -> Stack:
    """The same software, so many times as slow in everything but what a message waits on the wire."""
    slower = {key: getattr(software, key) * factor for key in _SECONDS_US}
    less = {key: getattr(software, key) / factor for key in _RATES}
    return replace(software, name=f"{software.name} x {factor:.3g}", **slower, **less)


def _read(table: Table, name: str) -> Stack:
    table.known(_KEYS)
    values: dict[str, float | bool | int | FittedRange | tuple[FittedRows, ...]] = {}
    sources: dict[str, Source] = {}
    for key in table.values:
        if key in FLAGS:
            values[key], sources[key] = table.constant(key)
        elif key in COUNTS:
            values[key] = int(table.number(key)[0])
            sources[key] = table.number(key)[1]
        elif key == "seen":
            value, sources[key] = table.constant(key)
            values[key] = _range(value)
        elif key == "families":
            value, sources[key] = table.constant(key)
            values[key] = tuple(
                FittedRows(rows["error"], _range({k: v for k, v in rows.items() if k != "error"}))
                for rows in value
            )
        elif key != "like":
            values[key], sources[key] = table.number(key, 1e-6 if key in _SECONDS_US else 1.0)
    for key in ("dp_bus", "p2p"):
        if key not in values:
            values[key], sources[key] = values["tp_bus"], sources["tp_bus"]
    return Stack(name=name, sources=sources, **values)  # pyright: ignore[reportArgumentType]


def _range(table: Mapping[str, Sequence[Any]]) -> FittedRange:
    return FittedRange(**{name: tuple(value) for name, value in table.items()})
