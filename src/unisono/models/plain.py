"""A user's module without stem, blocks and head: as a chain along its graph or, where it has none, whole."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.models.chain import Chain, summed_cross_entropy
from unisono.models.inferred import inferred
from unisono.models.noise import Dropout, Noise
from unisono.models.traced import Untraceable
from unisono.spec.errors import UserCodeError
from unisono.spec.frames import words
from unisono.spec.layout import Anatomy

_DRAWS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


class HeardDropout(nn.Module):
    """A dropout of ours where torch's was: its noise comes from the module around it, for the pass that goes on."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.mask = Dropout(p)
        self.noise: Noise | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(x, self.noise)


class Unpacked(nn.Module):
    """A module of several inputs, which its `unpack` makes of the one tensor that the data gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if hasattr(module, "loss"):
            self.loss = module.loss

    def forward(self, x: Tensor) -> Any:
        return self.module(*self.module.unpack(x))  # type: ignore[operator]


class WholeModule(nn.Module):
    """A user's module without parts: all of it is the stem. Only dp and shard can spread it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._noisy = "noise" in inspect.signature(module.forward).parameters
        self._several = hasattr(module, "loss")

    def heard(self) -> None:
        """Put dropouts of ours in the places of torch's."""
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout:
                    setattr(parent, name, HeardDropout(child.p))

    def forward(self, x: Tensor, noise: Noise | None = None) -> Any:
        """What the user's loss takes, or scores."""
        for module in self.modules():
            if isinstance(module, HeardDropout):
                module.noise = noise
        y = self.module(x, noise=noise) if self._noisy else self.module(x)
        if isinstance(y, tuple) and self._several:
            return y
        if not isinstance(y, Tensor):
            raise UserCodeError(
                f"the model's forward returned {type(y).__name__}, not a tensor",
                where=forward_of(self.module),
                fix="return the scores of every target: [batch, ..., classes]",
            )
        return (
            y.clone() if y._is_view() else y
        )  # FSDP2 hooks its outputs, and a view may be written to behind it


class UserModel(Chain):
    """Gives a user's module the three parts that the house expects, of which two are empty. why: no graph of it was
    cut."""

    def __init__(self, module: nn.Module, why: str = "") -> None:
        drawn = drawing(module) if why else ""
        super().__init__(WholeModule(module), nn.ModuleList(), nn.Identity(), Anatomy(whole=why, drawn=drawn))
        self.loss = getattr(module, "loss", partial(told_cross_entropy, forward_of(module)))


def told_cross_entropy(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """The same, of a user's model: scores that do not fit the targets are told with the model's place."""
    if logits.shape[:-1] == targets.shape:
        try:
            return summed_cross_entropy(logits, targets)
        except (IndexError, RuntimeError) as error:
            if int(targets.max()) < logits.shape[-1]:
                raise
            what = f"a target is {int(targets.max())}, and the model scores {logits.shape[-1]} classes"
            fix = "a last layer of `vocab` or `classes` outputs, which the model function is given by these names"
            raise UserCodeError(what, where=where, fix=fix) from error
    raise UserCodeError(
        f"the model's scores are {list(logits.shape)}, for targets {list(targets.shape)}",
        where=where,
        fix=f"scores of shape {[*targets.shape, 'classes']}".replace("'", "")
        + ", or a `loss` of the model's own",
    )


def forward_of(module: nn.Module) -> str:
    """Where a user's module says what it does."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in forward" if code else type(module).__name__


def drawing(module: nn.Module) -> str:
    """The modules that draw from torch's own generator, in which masks would depend on the rank."""
    found = []
    for name, child in module.named_modules():
        attends = isinstance(child, nn.MultiheadAttention) and child.dropout > 0
        recurs = isinstance(child, nn.RNNBase) and child.dropout > 0
        if attends or recurs or (isinstance(child, _DRAWS) and getattr(child, "p", 1) > 0):
            found.append(f"{name} ({type(child).__name__})")
    return ", ".join(found)


def cut_model(model: UserModel, sample: Tensor) -> Chain:
    """A user's whole module as a chain along its graph; as it is, with the reason, where it has none. sample: an input
    of one sample, [1, ...]."""
    module = one_input(model.stem.module)  # type: ignore[arg-type]
    own = getattr(module, "loss", None)
    try:
        chain = inferred(module, sample, model.loss, plain=own is None)
        if own is None and chain.scores and isinstance(chain.scores[0], tuple):
            raise Untraceable("its forward returns several tensors, and it has no loss", forward_of(module))
        if own is not None and (why := looks_at(own, module, chain.scores, sample)):
            raise Untraceable(why, forward_of(module))
    except Untraceable as error:
        where = f" ({error.where})" if error.where else ""
        return kept_whole(UserModel(module), f"its graph cannot be cut: {error.why}{where}")
    for (
        parameter
    ) in module.parameters():  # the chain has their values; a loss of the module's keeps the module
        parameter.data = parameter.data.new_empty(0)
    return chain


def kept_whole(model: UserModel, why: str) -> UserModel:
    """The model with dropouts of ours, and with the reason for who asks it to be cut."""
    whole = UserModel(model.stem.module, why)  # type: ignore[arg-type]
    whole.stem.heard()  # type: ignore[operator]
    return whole


def one_input(module: nn.Module) -> nn.Module:
    """The module itself if it takes one tensor; one that unpacks it for a module of several. Raises UserCodeError."""
    if isinstance(module, Unpacked):
        return module
    told = inspect.signature(module.forward).parameters.items()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [n for n, p in told if p.default is p.empty and p.kind in plain and n != "noise"]
    if len(wanted) < 2:
        return module
    if not hasattr(module, "unpack"):
        raise UserCodeError(
            f"the model's forward takes {len(wanted)} inputs, {', '.join(wanted)}, and a sample is one tensor",
            where=forward_of(module),
            fix=f"a method `unpack(x)` that returns ({', '.join(wanted)})",
        )
    return Unpacked(module)


class _Looking(TorchFunctionMode):
    """Sees whether one of these tensors is read."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()
        self._held, self.seen = {id(t) for t in held}, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= any(id(x) in self._held for x in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def looks_at(
    loss: Callable[[Any, Tensor], Tensor], module: nn.Module, scores: Sequence[tuple[int, ...]] | tuple[int, ...],
    sample: Tensor,
) -> str:  # fmt: skip
    """Why a loss of the module's own keeps it whole: it reads the module's tensors, or it cannot be tried; "" where
    neither. scores: shape of each output for one sample; one shape where there is one output."""
    tokens = not sample.is_floating_point()
    targets = torch.zeros((2, *sample.shape[1:]) if tokens else (2,), dtype=torch.int64)
    several = bool(scores) and isinstance(scores[0], tuple)
    made = [torch.ones(2, *shape) for shape in (scores if several else [scores])]  # type: ignore[misc]
    looking = _Looking([*module.parameters(), *module.buffers()])
    try:
        with torch.no_grad(), looking:
            loss(tuple(made) if several else made[0], targets)
    except Exception as error:
        return f"its loss could not be tried on zeros: {words(error, 120)}"
    return "its loss reads weights of the model" if looking.seen else ""
