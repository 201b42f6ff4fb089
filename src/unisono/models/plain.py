"""A user's module without stem, blocks and head, kept whole; cutting it along its graph is the sister package's."""

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from unisono.models.chain import Chain, summed_cross_entropy
from unisono.models.noise import Dropout, Noise
from unisono.spec.errors import UserCodeError
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
    names = []
    for name, child in module.named_modules():
        attends = isinstance(child, nn.MultiheadAttention) and child.dropout > 0
        recurs = isinstance(child, nn.RNNBase) and child.dropout > 0
        if attends or recurs or (isinstance(child, _DRAWS) and getattr(child, "p", 1) > 0):
            names.append(f"{name} ({type(child).__name__})")
    return ", ".join(names)


def kept_whole(model: UserModel, why: str) -> UserModel:
    """The model with dropouts of ours, and with the reason for who asks it to be cut."""
    whole = UserModel(model.stem.module, why)  # type: ignore[arg-type]
    whole.stem.heard()  # type: ignore[operator]
    return whole


def one_input(module: nn.Module) -> nn.Module:
    """The module itself if it takes one tensor; one that unpacks it for a module of several. Raises UserCodeError."""
    if isinstance(module, Unpacked):
        return module
    parameters = inspect.signature(module.forward).parameters.items()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [n for n, p in parameters if p.default is p.empty and p.kind in plain and n != "noise"]
    if len(wanted) < 2:
        return module
    if not hasattr(module, "unpack"):
        raise UserCodeError(
            f"the model's forward takes {len(wanted)} inputs, {', '.join(wanted)}, and a sample is one tensor",
            where=forward_of(module),
            fix=f"a method `unpack(x)` that returns ({', '.join(wanted)})",
        )
    return Unpacked(module)
