"""Whether all ranks made the same of a user's module, compared before one of them leaves the others in a collective."""

import json
from collections import Counter
from hashlib import blake2b

import torch
from torch import nn

from unisono.comm.group import Group
from unisono.spec.errors import UsageError


def check_same(model: nn.Module, world: Group, device: torch.device) -> None:
    """Raises UsageError L05 on every rank where some have other parameters, or another cut of the graph, than most.

    A user's function is called on every rank, and its module is traced there. One that looks at an environment, or goes
    through a set, may come out differently. All ranks of the world call it, or it hangs.
    """
    cut = {name: list(names) for name, names in getattr(model, "cut_names", {}).items()}
    shapes = [(name, list(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    said = json.dumps([shapes, cut])
    mine = int.from_bytes(blake2b(said.encode(), digest_size=7).digest(), "little")
    digests = world.all_gather(torch.tensor([mine], device=device)).tolist()
    usual, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, digest in zip(world.ranks, digests, strict=True) if digest != usual]
    if odd:
        raise UsageError(
            f"rank {odd[0]} made another model of model.kind than most ranks did, or cut its graph in another way",
            where="model.kind",
            likely="its function depends on the environment, on the host's files, or on the order of a set",
            fix="a function that returns the same module on every rank",
            code="L05",
        )
