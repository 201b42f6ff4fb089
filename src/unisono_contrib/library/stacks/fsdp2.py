"""torch's `fully_shard`, FSDP2. options: its keywords; `children` says whether each child is a group of its own,
`accumulate` whether gradients meet with the `last` micro-batch or with `each`, `replicas` how often all is held. Of
`mp_policy` dtypes by name."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from unisono_contrib.library.stacks._adapter import StackAdapter, misfit


class Fsdp2(StackAdapter):
    """Gradients of micro-batches are reduced with the last one's."""

    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "accumulate": ("last", "each"),
        "children": (True, False),
        "reshard_after_forward": (True, False),
        "replicas": (1, 2),
        "mp_policy": (None, {"param_dtype": "float64", "reduce_dtype": "float64"}),
    }
    models: ClassVar[Sequence[str]] = ("mlp", "norms", "frozen", "twice", "gpt", "moe", "idle")

    def wrapped(self) -> Any:
        place, options = self.place, dict(self.place.options)
        options.pop("accumulate", None)
        if policy := options.pop("mp_policy", None):
            dtypes = {key: getattr(torch, x) if key.endswith("dtype") else x for key, x in policy.items()}
            options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
        if (replicas := options.pop("replicas", 1)) > 1:
            if place.world % replicas:
                raise misfit(
                    f"{place.world} ranks do not hold {replicas} replicas",
                    'check_stack("fsdp2")',
                    "a divisor of ranks",
                )
            options["mesh"] = init_device_mesh(
                "cpu", (replicas, place.world // replicas), mesh_dim_names=("replica", "shard")
            )
        for child in groups_of(self.bare) if options.pop("children", True) else ():
            fully_shard(child, **options)
        return fully_shard(self.bare, **options)

    def train(self) -> None:
        place = self.place
        for micro, batch in enumerate(place.batches):
            last = micro == len(place.batches) - 1
            place.model.set_requires_gradient_sync(last or place.options.get("accumulate") == "each")
            (self.step.loss(place.model, batch) * place.part(micro)).backward()
        self.finish()


def groups_of(model: nn.Module) -> list[nn.Module]:
    """The children with weights of their own; those of a list are children too. A weight that two of them have, such as
    tied embeddings, is the root's: a group that holds it would take it from the other one."""
    children = [
        inner
        for child in model.children()
        for inner in (child if isinstance(child, nn.ModuleList) else [child])
    ]
    held = [(child, {id(p) for p in child.parameters()}) for child in children]
    return [
        child
        for child, mine in held
        if mine and not any(mine & other for it, other in held if it is not child)
    ]
