"""What of a foreign model is swapped so that it can be dealt: a layer that lies transposed becomes a plain one, a fused
projection becomes its three parts, and experts become a stack that ranks can share. All compute what they computed.

Each swap notes which boxes of the library's weights the new ones are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.hf.names import NamedPart
from unisono.models.moe import MoEConfig
from unisono.models.moe.dispatch import Dispatch, ExpertStack
from unisono.models.moe.routing import TokenChoice
from unisono.spec.errors import UsageError

Origins = dict[nn.Parameter, tuple[NamedPart, ...]]
"""Of a parameter that a swap made: which boxes of the library's it is."""


class FusedHeads(nn.Module):
    """A projection to queries, keys and values, whose rows lie by heads: of each its query, key and value, so that a
    slice of rows is whole heads. The result is as before: all queries, all keys, all values. each: width of a head."""

    def __init__(self, width: int, each: int) -> None:
        super().__init__()
        self.each = each
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (-1, 3, self.each)).transpose(-3, -2).flatten(-3)


class ScaledTable(nn.Module):
    """An embedding whose rows are multiplied by a constant, as two modules, so that the table can be dealt."""

    def __init__(self, whole: nn.Embedding) -> None:
        super().__init__()
        self.scale: Tensor = whole.embed_scale  # type: ignore[assignment]
        self.table = nn.Embedding(whole.num_embeddings, whole.embedding_dim, whole.padding_idx)
        self.table.weight = whole.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return x * self.scale.to(device=x.device, dtype=x.dtype)


class ForeignExperts(nn.Module):
    """A sparse layer's experts, called as the library calls its own: tokens [N, D], the experts of each [N, W] and
    their weights → [N, D]. samples: of the micro-batch, into which N is divided where ranks share positions."""

    def __init__(self, experts: int, width: int, hidden: int, chosen: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"n_experts": experts, "d_model": width, "d_expert": hidden, "top_k": chosen}
        self.stack = ExpertStack(MoEConfig(kind="moe", activation="swiglu", bias=False, **sizes))
        self.dispatch = Dispatch()
        self.samples = 1

    def forward(self, x_ND: Tensor, expert_NW: Tensor, weight_NW: Tensor) -> Tensor:
        wide_NW = weight_NW.to(
            torch.promote_types(weight_NW.dtype, x_ND.dtype)
        )  # sums over ranks are not rounded
        x_BtD, expert, weight = (x.unflatten(0, (self.samples, -1)) for x in (x_ND, expert_NW, wide_NW))
        kept = torch.ones_like(expert, dtype=torch.bool)
        return self.dispatch(x_BtD, TokenChoice(expert, weight, kept), self.stack).flatten(0, 1)


def swap(model: nn.Module) -> Origins:
    """Swap in place. Raises UsageError P12 for experts of another kind than those with a SiLU gate."""
    origins: Origins = {}
    for name, module in list(model.named_modules()):
        fresh = None
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            fresh = _plain(name, module, model, origins)
        elif {key for key, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}:
            fresh = _experts(name, module, origins)
            _parent(model, name).register_forward_pre_hook(_tell_samples(fresh))
        if fresh is not None:
            setattr(_parent(model, name), name.rpartition(".")[2], fresh)
    return origins


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _plain(name: str, conv: Any, model: nn.Module, origins: Origins) -> nn.Module:
    """A product with a transposed weight [in, out]: as a linear layer, or by heads where an attention takes its result
    apart."""
    width, size = conv.weight.shape
    parent: Any = _parent(model, name)
    if getattr(parent, "split_size", 0) * 3 != size:
        linear = nn.Linear(width, size)
        _note(linear, name, [(0, 0, size)], origins)
        return linear
    each = parent.head_dim
    fused = FusedHeads(width, each)
    heads = [(head, part) for head in range(width // each) for part in range(3)]
    _note(fused.qkv, name, [((3 * h + p) * each, p * width + h * each, each) for h, p in heads], origins)
    parent.register_forward_pre_hook(_tell_size)
    return fused


def _note(linear: nn.Linear, name: str, rows: list[tuple[int, int, int]], origins: Origins) -> None:
    """rows: (where they begin in ours, where in theirs, how many)."""
    width = linear.in_features
    bias: Any = linear.bias
    weight: Any = linear.weight
    origins[weight] = tuple(
        NamedPart(f"{name}.weight", (ours, 0), (many, width), (0, theirs), turned=True)
        for ours, theirs, many in rows
    )
    origins[bias] = tuple(
        NamedPart(f"{name}.bias", (ours,), (many,), (theirs,)) for ours, theirs, many in rows
    )


def _tell_size(module: Any, _: Any) -> None:
    """How wide the queries are that lie here."""
    module.split_size = module.c_attn.qkv.weight.shape[0] // 3


def _tell_samples(experts: ForeignExperts) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        experts.samples = args[0].shape[0]

    return hook


def _experts(name: str, module: Any, origins: Origins) -> ForeignExperts:
    if "silu" not in type(module.act_fn).__name__.lower():
        what = f"{name}: experts with {type(module.act_fn).__name__} cannot be split, nor run without numbers"
        raise UsageError(what, where="model.kind", fix="experts with a SiLU gate, as Mixtral's", code="P12")
    (E, fused, D), hidden = module.gate_up_proj.shape, module.down_proj.shape[2]
    experts = ForeignExperts(E, D, hidden, 1)
    stack: Any = experts.stack
    box = (E, hidden, D)
    zeros = (0, 0, 0)
    gate: Any = stack.gate
    origins[gate] = (NamedPart(f"{name}.gate_up_proj", zeros, box, zeros),)
    origins[stack.up] = (NamedPart(f"{name}.gate_up_proj", zeros, box, (0, fused - hidden, 0)),)
    origins[stack.down] = (NamedPart(f"{name}.down_proj", zeros, (E, D, hidden), zeros),)
    return experts


def scaled_table(model: nn.Module, table: str) -> str:
    """Take an embedding that scales its rows apart; the name of the one that can be dealt, "" where there is none. Its
    constants have been kept."""
    whole: Any = model.get_submodule(table)
    if type(whole) is nn.Embedding:
        return table
    if not isinstance(whole, nn.Embedding) or not isinstance(getattr(whole, "embed_scale", None), Tensor):
        return ""
    setattr(_parent(model, table), table.rpartition(".")[2], ScaledTable(whole))
    return f"{table}.table"
