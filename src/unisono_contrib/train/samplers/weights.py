"""Versions of a model's weights: gathered from any plan, put into a sampler's model, and compared by digests.

What a sampler acknowledges is read from the tensors with which it computes, under every name by which the model knows
them. So weights that were received and not loaded, a tied weight that was missed or a transposed one differ at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import Recipe
from unisono.train.build.build import model_of
from unisono.train.data.dataset import Corpus
from unisono.train.state.run_state import pieces_of
from unisono.train.step.run import Run
from unisono_contrib.sync._whole import Boxes, BoxShape

Compute = Callable[[Tensor], Tensor]
"""Tokens [n, t] → logits [n, t, classes]."""

_MODEL = "model/"
_PROBED = 8  # tokens


def digest_of(x: Tensor) -> str:
    """32 hex digits of a tensor's dtype, shape and elements."""
    hashed = blake2b(f"{x.dtype}{tuple(x.shape)}".encode(), digest_size=16)
    flat = x.detach().cpu().contiguous().view(-1)
    hashed.update(flat.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def whole_weights(run: Run) -> dict[str, Tensor]:
    """The run's weights and buffers that learn, by name, whole, on every rank. Every rank calls it, or it hangs."""
    pieces = [piece for piece in pieces_of(run, center=run.sync.center()) if piece.name.startswith(_MODEL)]
    mine = {piece.name.removeprefix(_MODEL): piece for piece in pieces if piece.saved}
    parts = {
        name: BoxShape(piece.full_shape, piece.start, tuple(piece.tensor.shape), piece.tensor.dtype)
        for name, piece in mine.items()
    }
    boxes = Boxes(parts, run.mesh.world, run.mesh.world, run.local.device)
    return boxes.gather({name: piece.tensor.detach() for name, piece in mine.items()})


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """What a model computes with. digests: by name, of parameters and buffers that are kept. logits: digest of what it
    makes of a few tokens, by the way in which samples are drawn."""

    version: int
    digests: Mapping[str, str]
    logits: str


class WeightHolder:
    """A model whose weights come in versions. ties: alias → owner, of which the owner alone is sent. compute: by which
    samples are drawn; the model itself if None."""

    def __init__(
        self, model: nn.Module, ties: Sequence[tuple[str, str]] = (), compute: Compute | None = None
    ) -> None:
        self.model, self.ties, self.version = model.eval(), dict(ties), -1
        self.compute: Compute = compute or model

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on. Raises KeyError for a name that the model lacks."""
        held = self._tensors()
        with torch.no_grad():
            for name, x in weights.items():
                held[name].copy_(x)
        self.version = version

    @torch.no_grad()
    def held(self) -> HeldWeights:
        """Read from the live tensors."""
        digests = {name: digest_of(x) for name, x in self._tensors().items()}
        return HeldWeights(self.version, digests, digest_of(self.compute(probe_of(self.model))))

    def _tensors(self) -> dict[str, Tensor]:
        kept = self.model.state_dict(keep_vars=True)
        return {name: x.detach() for name, x in kept.items() if isinstance(x, Tensor)}


def holder_of(recipe: Recipe, corpus: Corpus, dtype: torch.dtype) -> WeightHolder:
    """The recipe's model, whole, with room for weights that are still to come. dtype: of what is computed; weights are
    in float32, or wider where it is."""
    model = model_of(recipe, corpus)
    anatomy: Any = getattr(model, "anatomy", None)
    ties: Sequence[tuple[str, str]] = getattr(anatomy, "ties", ())
    wide = torch.promote_types(dtype, torch.float32)
    kept = model.state_dict()
    room = {
        n: torch.zeros(x.shape, dtype=wide if x.is_floating_point() else x.dtype) for n, x in kept.items()
    }
    model.load_state_dict(room, assign=True)
    for alias, owner in ties:  # each name has got a tensor of its own
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    return WeightHolder(model, ties)


def expected(weights: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, str]:
    """The digests of a model that holds these weights; an alias has its owner's."""
    digests = {name: digest_of(x) for name, x in weights.items()}
    return digests | {alias: digests[owner] for alias, owner in ties.items() if owner in digests}


def differing(wanted: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """The names whose digests differ, and those that one side lacks, in order."""
    return sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))


def probe_of(model: nn.Module) -> Tensor:
    """A few tokens, int64 [1, n], all different where the model knows as many."""
    device = next(model.parameters()).device
    classes = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)
    return (torch.arange(_PROBED, device=device) % classes)[None]
