"""Any module as a workload: one forward pass on the meta device, where tensors have shapes and no memory.

Every operation is seen as the kernels see it (a dispatch mode), and every tensor that autograd keeps (saved-tensor
hooks); both are written down for the part of the model that is at work. Attention through torch's fused function is
taken as fused, which on the meta device it would not be. Two batch sizes are traced: what grows with the batch belongs
to a sample, the rest (tables of positions, masks) to nobody.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.spec.workload import Product, Workload, WorkPart, joined

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FREE = frozenset(("_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias", "empty", "new_empty"))
_LOOKS_UP = frozenset(("embedding", "index", "gather", "index_select", "take_along_dim"))
BATCHES = (2, 4)  # more than one, because batch normalisation refuses a single value


@dataclass(slots=True)
class PassWork:
    """What one part has done in one pass of a whole batch. kept: bytes."""

    products: list[Product] = field(default_factory=list)
    kept: int = 0
    moved: int = 0
    kernels: int = 0
    output: int = 0


class KernelRecorder(TorchDispatchMode):
    """Writes every kernel down for the part `at` work."""

    def __init__(self, tallies: list[PassWork]) -> None:
        super().__init__()
        self.tallies, self.at = tallies, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _FREE:
            return out
        tally = self.tallies[self.at]
        products = _products(name, args, out)
        tally.kernels += 1
        if products:
            tally.products += products
            return out
        written = sum(t.numel() for t in _tensors(out))
        read = written if name in _LOOKS_UP else sum(t.numel() for t in _tensors(args))
        tally.moved += read + written
        return out


class Fused(TorchFunctionMode):
    """Torch's functions as the one kernel that they are on a device: attention that never writes its scores (Dao et
    al., 2022), where masks and dropout cost nothing, and RMS normalisation. On meta they would be many."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.rms_norm, torch.rms_norm):
            return _normalised(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (
            args[n] if len(args) > n else kwargs[k] for n, k in enumerate(("query", "key", "value"))
        )
        if key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(times, dim=-3) for t in (key, value))
        if query.dim() == 3:
            return self._fused(*(t.unsqueeze(0) for t in (query, key, value))).squeeze(0)
        return self._fused(query, key, value)

    @staticmethod
    def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


class _Rms(torch.autograd.Function):
    """RMS normalisation as one kernel, which keeps its input and one number a row; only ever traced forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, _, scale = torch.native_layer_norm(x, x.shape[-1:], weight, None, 0.0)
        ctx.save_for_backward(x, scale)
        return y


def _normalised(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _Rms.apply(input, weight)


def trace(
    model: nn.Module,
    inputs: Callable[[int], Tensor],
    *,
    forward: Callable[[Tensor], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Workload:
    """The workload of `model`, whose parameters and buffers are on the meta device.

    inputs: a batch of so many samples, on the meta device. forward: the model itself if None. loss: of what it gives,
    so that what the loss keeps is counted; without one, the pass ends at the output.
    """
    passes = [_pass(model, inputs(size), forward or model, loss) for size in BATCHES]
    names, listed = passes[0][0], dict(units(model))
    (_, small), (_, large) = passes
    parts = _merged(
        [
            (_of_one(name, elements, *both), listed.get(name, False))
            for (name, elements), *both in zip(_parameters(model, names), small, large, strict=True)
        ]
    )
    total = sum(p.numel() for p in model.parameters())
    return Workload(parts, sum(part.parameters for part in parts) - total)


def units(module: nn.Module, name: str = "", inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(name, whether it is an element of a list or sequence) of the modules that a model is a chain of: elements of
    its lists and sequences, and what lies beside them."""
    holds = any(isinstance(m, _CONTAINERS) and len(m) > 1 for m in module.modules())
    listed = isinstance(module, _CONTAINERS)
    if not (listed or (holds and not inside)) or not any(True for _ in module.children()):
        yield name, inside
        return
    for child, inner in module.named_children():
        yield from units(inner, f"{name}.{child}" if name else child, listed)


def _pass(
    model: nn.Module, batch: Tensor, forward: Callable[[Tensor], Any], loss: Callable[[Any], Tensor] | None
) -> tuple[list[str], list[PassWork]]:
    """(names of the parts in the order in which they begin, what each did)."""
    names: list[str] = []
    tallies: list[PassWork] = []
    recorder = KernelRecorder(tallies)
    ours = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), batch)}
    alive: dict[int, Tensor] = {}  # a storage's number is its own as long as it lives

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if name not in names:
                names.append(name)
                if len(names) > 1:  # what came before the first part is counted with it
                    tallies.append(PassWork())
            recorder.at = names.index(name)

        return hook

    def end(_: nn.Module, __: Any, output: Any) -> None:
        tallies[recorder.at].output = max((t.numel() for t in _tensors(output)), default=0)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours and storage._cdata not in alive:
            alive[storage._cdata] = tensor
            tallies[recorder.at].kept += storage.nbytes()
        return tensor

    tallies.append(PassWork())
    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(begin(name)) for name, _ in units(model)]
    hooks += [modules[name].register_forward_hook(end) for name, _ in units(model)]
    try:
        with recorder, Fused(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output = forward(batch)
            if loss is not None:
                loss(output)
    finally:
        for hook in hooks:
            hook.remove()
    return names, tallies


def _of_one(name: str, parameters: int, small: PassWork, large: PassWork) -> WorkPart:
    """What one more sample adds."""
    more = BATCHES[1] - BATCHES[0]
    grown = (_grown(a, b) for a, b in zip(small.products, large.products, strict=True))
    products = tuple(p for p in grown if p is not None)
    return WorkPart(
        name,
        parameters,
        sum(p.flops for p in products),
        (large.kept - small.kept) // (4 * more),
        (large.output - small.output) // more,
        products=products,
        moved=(large.moved - small.moved) // more,
        kernels=small.kernels,
    )


def _grown(small: Product, large: Product) -> Product | None:
    """The product of one sample; None for one that does not grow."""
    more = BATCHES[1] - BATCHES[0]
    if large.rows != small.rows:
        return small._replace(rows=(large.rows - small.rows) // more, read=(large.read - small.read) // more)
    if large.many != small.many:
        return small._replace(many=(large.many - small.many) // more, batched=True)
    return None


def _products(name: str, args: Any, out: Any) -> list[Product]:
    """The products that a kernel is, if it is one."""
    if name in ("mm", "addmm"):
        a, b = args[-2:] if name == "mm" else args[1:3]
        return [Product(a.shape[0], a.shape[1], b.shape[1])]
    if name in ("bmm", "baddbmm"):
        a, b = args[-2:] if name == "bmm" else args[1:3]
        return [Product(a.shape[1], a.shape[2], b.shape[2], a.shape[0])]
    if name == "convolution":
        x, weight, transposed, groups = args[0], args[1], args[6], args[8]
        if transposed:  # each element of the input meets a whole filter
            inner, columns = x.shape[1] // groups, weight[0].numel()
            return [Product(x.numel() // x.shape[1], inner, columns, groups, x.numel())]
        columns = weight.shape[0] // groups
        return [Product(out.numel() // out.shape[1], weight[0].numel(), columns, groups, x.numel())]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        query, key, value = args[:3]
        many = math.prod(query.shape[:-2])
        rows, inner, columns = query.shape[-2], query.shape[-1], key.shape[-2]
        return [Product(rows, inner, columns, many), Product(rows, columns, value.shape[-1], many)]
    return []


def _parameters(model: nn.Module, names: list[str]) -> list[tuple[str, int]]:
    """(part, elements of its parameters); those that lie in no part count with the first."""
    modules = dict(model.named_modules())
    each = [[*modules[name].parameters()] for name in names] or [[]]
    seen = {id(p) for params in each for p in params}
    each[0] += [p for p in model.parameters() if id(p) not in seen]
    return [(name, sum(p.numel() for p in params)) for name, params in zip(names or [""], each, strict=True)]


def _merged(parts: list[tuple[WorkPart, bool]]) -> tuple[WorkPart, ...]:
    """Stem, blocks and head: what comes before and after the elements of lists is one part each, and an element
    without parameters belongs to the one before it."""
    listed = [n for n, (_, inside) in enumerate(parts) if inside]
    first, last = (listed[0], listed[-1] + 1) if listed else (len(parts), len(parts))
    blocks: list[WorkPart] = []
    for part, _ in parts[first:last]:
        if part.parameters or not blocks:
            blocks.append(part)
        else:
            blocks[-1] = joined(blocks[-1].name, [blocks[-1], part])
    stem, head = [part for part, _ in parts[:first]], [part for part, _ in parts[last:]]
    # A chain of elements alone has its first and its last as ends.
    if not stem and len(blocks) > 1:
        stem = [blocks.pop(0)]
    if not head and len(blocks) > 1:
        head = [blocks.pop()]
    if not blocks:
        blocks, stem = [joined("model", stem)], []
    return joined("stem", stem), *blocks, joined("head", head)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, lists and tuples looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
