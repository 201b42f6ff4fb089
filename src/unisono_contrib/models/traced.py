"""A plain module as the graph of its operators, by `torch.export`.

Export runs the module once on tensors without numbers, with a batch whose size is a symbol. It was taken before
`torch.fx`'s own tracing because it follows ordinary Python (shapes, loops, branches on sizes), keeps operators such as
`linear` and `layer_norm` whole, and says of each which module it stands in. What it cannot follow is control flow that
depends on numbers, and such a module stays whole. So does one whose forward changes what the module holds beside its
tensors, such as a counter of its calls, or draws from Python's or NumPy's random numbers: a later call may do other
things than the one that was followed, and a graph is the same in every step.

The module is traced twice, in float64 while training and in float32 while evaluating. What differs follows the run: a
dtype, the smallest number of a dtype, the mode of a batch norm. Anything else that differs is refused.
"""

import copy
import inspect
import logging
import operator
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from unisono.models.cut_chain import line_of
from unisono.models.noise import Dropout
from unisono.spec.frames import place, words
from unisono_contrib.models.axes import packet, place_of

BATCH = 11  # samples of the batch that is traced: no size that a model is likely to have
_DROPS = ("dropout", "dropout_", "feature_dropout", "feature_dropout_")
_COUNTER = "num_batches_tracked"
_OF_TORCH = frozenset(vars(nn.Module()))
_ONE_TRACE = threading.Lock()  # export keeps one state for a process: two traces at once spoil each other


class Untraceable(Exception):
    """Why a module has no graph, and where that is in the user's file."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(why)
        self.why, self.where = why, where


@dataclass(frozen=True, slots=True)
class Traced:
    """The graph of a module. input: its placeholder. parameters, buffers: by placeholder, the names in the module; a
    tied weight has one. constants: tensors that the module holds beside them. outputs: what is returned, and whether
    that is a tuple."""

    graph: Graph
    input: Node
    parameters: Mapping[Node, str]
    buffers: Mapping[Node, str]
    constants: Mapping[Node, Tensor]
    outputs: Sequence[Node]
    several: bool


@dataclass(frozen=True, slots=True)
class Either:
    """An argument that depends on the dtype of the run: what it is in float32 and in float64."""

    single: Any
    double: Any


class _Stub(nn.Module):
    """Stands for a dropout of ours while a module is traced, which is told no noise then."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, noise: object = None) -> Tensor:
        return F.dropout(x, self.p, self.training)


def traced(module: nn.Module, sample: Tensor) -> Traced:
    """The graph of a module. sample: an input of one sample, [1, ...]. Raises Untraceable."""
    inputs = sample.new_zeros((BATCH, *sample.shape[1:]))
    with _ONE_TRACE, _quiet():
        double = _exported(module, inputs, torch.float64, True)
        single = _exported(module, inputs, torch.float32, False)
    graph, signature = double.graph, double.graph_signature
    _without_checks(graph)
    _without_checks(single.graph)
    _follow(graph, single.graph)
    _out_of_place(graph)
    held = {n: n.name for n in graph.nodes if n.op == "placeholder"}
    first = _first_names(module)
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {n: double.constants[lifted[name]] for n, name in held.items() if name in lifted}
    (placeholder,) = (n for n, name in held.items() if name in signature.user_inputs)
    (output,) = (n for n in graph.nodes if n.op == "output")
    returned = output.args[0]
    if not all(isinstance(n, Node) for n in returned):  # pyright: ignore
        raise Untraceable("the model's forward returns something else than tensors", _forward_of(module))
    spec = double.call_spec.out_spec
    return Traced(
        graph,
        placeholder,
        {n: first[signature.inputs_to_parameters[s]] for n, s in held.items() if s in signature.inputs_to_parameters},
        {n: signature.inputs_to_buffers[s] for n, s in held.items() if s in signature.inputs_to_buffers},
        constants,
        tuple(returned),  # pyright: ignore
        spec is not None and not spec.is_leaf(),
    )  # fmt: skip


def _exported(module: nn.Module, inputs: Tensor, dtype: torch.dtype, training: bool) -> Any:
    """The module's graph in one dtype and one mode; the module itself is not touched."""
    x = inputs.to(dtype) if inputs.is_floating_point() else inputs
    shadow = _shadow(module, dtype).train(training)
    changes = _watched(shadow)
    name, *others = inspect.signature(module.forward).parameters
    noise = {"noise": None} if "noise" in others else {}
    shapes = {name: {0: torch.export.Dim.DYNAMIC}, **noise}
    try:
        exported = torch.export.export(shadow, (x,), noise, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        branches = "DataDependent" in type(error).__name__
        why = "its forward branches on numbers of a tensor" if branches else words(error, 160)
        raise Untraceable(why, place(error) or _forward_of(module)) from error
    if changes:
        raise Untraceable(f"its forward {changes[0]}", _forward_of(module))
    return exported


def _watched(module: nn.Module) -> list[str]:
    """What a call of the module changes beside tensors, on which a later call may depend; filled while it is called,
    for export puts attributes back afterwards."""
    before: list[dict[str, Any]] = []
    changes: list[str] = []

    def begins(module: nn.Module, inputs: Any) -> None:
        before.append(_beside_tensors(module))

    def ends(module: nn.Module, inputs: Any, returned: Any) -> None:
        was, now = before.pop(), _beside_tensors(module)
        changes.extend(f"changes {n}" for n in was | now if n in was.keys() ^ now.keys() or was[n] != now[n])

    module.register_forward_pre_hook(begins)
    module.register_forward_hook(ends)
    return changes


def _beside_tensors(module: nn.Module) -> dict[str, Any]:
    """What the modules hold that are plain values, by name, and where the generators of random numbers stand."""
    held: dict[str, Any] = {
        "where Python's random numbers stand": random.getstate(),
        "where NumPy's random numbers stand": _plain(np.random.get_state(legacy=False)),
    }
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in _OF_TORCH:
                held[f"{prefix}.{name}".lstrip(".")] = _plain(value)
    return held


def _plain(value: Any, depth: int = 4) -> Any:
    """A value that stays as it is when the other is written to, and differs then; of a tensor, which one it is."""
    if value is None or isinstance(value, (str, bytes, int)):
        return value
    if isinstance(value, (float, complex)):
        return repr(value)  # for not-a-number differs from itself
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if depth and isinstance(value, Mapping):
        return [(_plain(k, depth - 1), _plain(v, depth - 1)) for k, v in value.items()]
    if depth and isinstance(value, (list, tuple, set, frozenset, deque)):
        return [_plain(item, depth - 1) for item in value]
    if depth and not isinstance(value, (Tensor, nn.Module, type)) and hasattr(value, "__dict__"):
        return id(value), _plain(vars(value), depth - 1)
    return id(value)


def _shadow(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters and buffers have sizes and dtypes, and memory that nobody writes to."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        like = torch.empty(
            tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cpu"
        )
        known = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if known else like
    try:
        shadow = copy.deepcopy(module, memo)
    except Exception as error:
        raise Untraceable(f"the model cannot be copied: {words(error, 120)}", _forward_of(module)) from error
    for parent in list(shadow.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Dropout):
                setattr(parent, name, _Stub(child.p))
    return shadow


def _forward_of(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in forward" if code else type(module).__name__


def _first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter → the first name of the same one."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


@contextmanager
def _quiet() -> Iterator[None]:
    """What export logs of a module that it cannot follow is said by our error, in one line."""
    logger = logging.getLogger("torch")
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch")]
    before = {n: logging.getLogger(n).disabled for n in names}
    disabled, logger.disabled = logger.disabled, True
    for name in names:
        logging.getLogger(name).disabled = True
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        logger.disabled = disabled
        for name, was in before.items():
            logging.getLogger(name).disabled = was


# What differs between the two traces ------------------------------------------------------------------------


def _without_checks(graph: Graph) -> None:
    """Export's own checks of shapes and dtypes belong to the traced dtype."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and packet(node).startswith(("_assert", "sym_constrain")):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _writes(node):
            graph.erase_node(node)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (schema is not None and schema.is_mutable) or packet(node) == "batch_norm"


def _follow(graph: Graph, other: Graph) -> None:
    """Mark what the run decides in `graph`, float64 and training. other: float32 and evaluating."""
    mine = [n for n in graph.nodes if not _only_training(n)]
    theirs = [n for n in other.nodes if not _only_training(n)]
    if len(mine) != len(theirs):
        raise Untraceable(
            "the model does other things while it is trained than while it is evaluated", _first_line(graph)
        )
    for a, b in zip(mine, theirs, strict=True):
        if packet(a) != packet(b) or a.op != b.op:
            raise Untraceable(
                f"{packet(a)} while training is {packet(b)} while evaluating, or in another dtype",
                line_of(a) or line_of(b),
            )
        if a.op == "call_function":
            if packet(a) == "scaled_dot_product_attention":  # which drops nothing while evaluating
                b.args, b.kwargs = _as_dropped(b.args, a.args), {**b.kwargs, **_dropping(a.kwargs)}
            a.args = _either(a.args, b.args)
            a.kwargs = _either(a.kwargs, b.kwargs)


def _as_dropped(mine: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*mine[:4], *other[4:5], *mine[5:])


def _dropping(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key == "dropout_p"}


def _only_training(node: Node) -> bool:
    """A dropout is nothing while evaluating; a batch norm counts its batches while training."""
    name = packet(node)
    counts = name == "add_" and isinstance(node.args[0], Node) and node.args[0].name.endswith(_COUNTER)
    return name in _DROPS or counts


def _either(a: Any, b: Any) -> Any:
    if isinstance(a, Node) or isinstance(b, Node):
        return a
    if isinstance(a, Mapping):
        return {key: _either(a[key], b[key]) for key in a}
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return type(a)(_either(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or a == b or (a != a and b != b):
        return a
    return Either(b, a)


def _first_line(graph: Graph) -> str:
    return next(filter(None, map(line_of, graph.nodes)), "")


# In place --------------------------------------------------------------------------------------------------


def _out_of_place(graph: Graph) -> None:
    """Operators that write into a value, such as `relu_`, as those that make a new one."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable or _only_counts(node):
            continue
        source, functional = node.args[0], _functional(node.target)
        if functional is None or not isinstance(source, Node) or _is_shared(source, node):
            raise Untraceable(f"{packet(node)} writes into a tensor in place", line_of(node))
        node.target = functional
        later = set(_after(node))
        source.replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)


def _only_counts(node: Node) -> bool:
    return packet(node) == "add_" and _only_training(node)


def _functional(target: Any) -> Callable[..., Any] | None:
    namespace, _, name = str(target.overloadpacket).rpartition(".")
    op = getattr(torch.ops.aten, name.removesuffix("_"), None) if namespace == "aten" else None
    return getattr(op, target._overloadname, None) if op is not None and name.endswith("_") else None


def _is_shared(source: Node, writer: Node) -> bool:
    """Whether others see what is written: a view of it, or what it is a view of."""
    views = any(_is_view(user) for user in source.users if user is not writer)
    return source.op != "call_function" or _is_view(source) or views


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or node.target is operator.getitem


def _after(node: Node) -> Iterator[Node]:
    at = node.next
    while at.op != "root":
        yield at
        at = at.next


def random_of(graph: Graph) -> list[str]:
    """Where the graph draws numbers that are no dropout: `normal_ in noise (net.py:12)`."""
    sources = []
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        drawn = torch.Tag.nondeterministic_seeded in tags and packet(node) not in _DROPS
        if drawn and packet(node) != "scaled_dot_product_attention":
            sources.append(f"{packet(node)} in {place_of(node)} ({line_of(node)})")
    return sources
