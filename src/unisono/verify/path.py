"""Count the additions on the longest way through a model, forward and backward, from which bounds follow."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.config import Resolved
from unisono.spec.fidelity import Fidelity
from unisono.train.build.build import model_of, sample_of
from unisono.train.data.dataset import Corpus
from unisono.verify.bounds import COMPUTE, BoundTerms, rhythm_of

JUMPS = (torch.ops.aten.relu, torch.ops.aten.relu_, torch.ops.aten.leaky_relu, torch.ops.aten.hardtanh,
         torch.ops.aten.max_pool2d_with_indices, torch.ops.aten.threshold)  # fmt: skip
PASSES = 2  # a normalisation or a softmax sums over its width twice, and again backward


def sizes_of(resolved: Resolved, corpus: Corpus) -> BoundTerms:
    """The sizes of a resolved recipe's model, and of all global batches that make one update."""
    model = model_of(resolved.recipe, corpus)
    batch, rhythm = resolved.batch, rhythm_of(resolved.plan)
    path, rounded = path_of(model)
    decay = resolved.recipe.train.optimiser().crossing
    plan = resolved.plan
    # Only there a layer's sum in float32 has another order, and shows beside the dtype of the run.
    cuts_layers = plan.tp * plan.cp * plan.ep > 1
    shows_float32 = plan.precision == "fp64" and cuts_layers
    shows_jumps = plan.precision in COMPUTE and cuts_layers
    # A section that promises less than the plan by itself has samples pass stages one by one.
    less = any(part.fidelity(plan) is not Fidelity.EXACT for part in resolved.recipe.sections())
    return BoundTerms(
        path=path + corpus.classes * 2 * PASSES,  # the loss normalises over the classes
        rounded=rounded,
        elements=sum(p.numel() for p in model.parameters()),
        tokens=batch.global_batch * _places(model) * rhythm,
        leaves=batch.leaves * rhythm,
        magnified=1.0 if decay is None else 2.0 / (1.0 - decay),
        narrow=read_in_float32(model, sample_of(corpus, 1)) if shows_float32 else frozenset(),
        regrouped=less,
        reshaped=less,
        jumps=shows_jumps and has_jumps(model, sample_of(corpus, 1)),
    )


def path_of(model: nn.Module) -> tuple[int, int]:
    """(additions, tensors stored) as if all modules of the model stood in one line; an upper bound, since branches
    that run side by side are counted one after the other."""
    additions = stored = 0
    for module in model.modules():
        length = _length(module)
        additions += length
        stored += 2 * (length > 0)  # the output forward, the gradient of the input backward
    sequence = getattr(getattr(model, "anatomy", None), "sequence", 0)
    blocks = getattr(model, "blocks", ())
    if sequence:  # attention sums over positions and head width without a module of its own
        widest = max((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), default=1)
        additions += len(blocks) * (2 * PASSES * sequence + 4 * sequence + 4 * widest)
        stored += len(blocks) * 6
    return additions + 2 * len(blocks), stored + 2 * len(blocks)


def _places(model: nn.Module) -> int:
    """Return the places of a sample over which the gradient of a weight is added up."""
    anatomy = getattr(model, "anatomy", None)
    return getattr(anatomy, "sequence", 0) or getattr(anatomy, "terms", 0) or 1


def _length(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features + module.out_features
    if isinstance(module, nn.modules.conv._ConvNd):
        window = math.prod(module.kernel_size)
        return window * (module.in_channels + module.out_channels) // module.groups
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return 2 * PASSES * math.prod(module.normalized_shape)
    if isinstance(module, nn.GroupNorm):
        return 2 * PASSES * module.num_channels // module.num_groups * 64  # positions of a small picture
    parameters = list(module.parameters(recurse=False))
    return int(getattr(module, "additions", 1 if parameters else 0))


class _Float32Copies(TorchDispatchMode):
    """Notes which of some tensors are copied into float32."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.copied = names, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32 and args:
            name = self.names.get(id(args[0]))
            self.copied |= {name} if name else set()
        return result


def read_in_float32(model: nn.Module, sample: Tensor) -> frozenset[str]:
    """Return the names of the weights that a model's own code reads in float32, as Gemma's norms do, though the model
    is float64: where `tp` or `cp` deals positions, their gradients are sums in float32 of another order.

    The model is moved to the meta device and run once there; one that cannot be run so has none. sample: an input on
    the meta device."""
    model.to("meta", torch.float64)
    seen = _Float32Copies({id(parameter): name for name, parameter in model.named_parameters()})
    return frozenset(seen.copied) if _watch_pass(model, sample, seen) else frozenset()


class _Jumps(TorchDispatchMode):
    """Notes whether an operation is called whose derivative jumps from one value to another."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= func.overloadpacket in JUMPS
        return func(*args, **(kwargs or {}))


def has_jumps(model: nn.Module, sample: Tensor) -> bool:
    """Whether the derivative of one of the model's operations jumps, as ReLU's does at zero: rounding in half precision
    turns units on and off, and then gradients differ by whole terms, whatever rounding itself may be.

    The model is moved to the meta device and run once there; of one that cannot be run so nothing is known."""
    model.to("meta", torch.float64)
    seen = _Jumps()
    _watch_pass(model, sample, seen)
    return seen.any


def _watch_pass(model: nn.Module, sample: Tensor, seen: TorchDispatchMode) -> bool:
    """Run a model on the meta device under `seen`; return whether that went well."""
    try:
        with seen, torch.no_grad():
            model(sample.double() if sample.is_floating_point() else sample)
    except Exception:  # a user's own code, which may ask for numbers
        return False
    return True
