"""Steps of training as users of other stacks write them, right and wrong. Imported by the ranks of tests."""

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unisono


class Digits(unisono.TrainingStep):
    """A small classifier by SGD, on random rows."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))

    def batch(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(5, 6, generator=drawn), torch.randint(0, 4, (5,), generator=drawn)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


class Decaying(Digits):
    clip = 0.05

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


class Momentum(Digits):
    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


class Muon(Digits):
    """Matrices by Muon; vectors stay as they are."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2, weight_decay=0.0)


class Uneven(Decaying):
    """Micro-batches with other numbers of targets."""

    def batch(self, number: int) -> Any:
        x, y = super().batch(number)
        return x, torch.where(torch.arange(5) < number % 3, -100, y)

    def weight(self, batch: Any) -> float:
        return float((batch[1] != -100).sum())


class Matrices(Digits):
    """Full matrices, whose gradients have full rank: Muon's rounding stays small."""

    def model(self) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) if i % 2 == 0 else nn.GELU() for i in range(5)))
        for p in model.parameters():
            p.use_muon = True  # read by DeepSpeed
        return model

    def batch(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(64, 8, generator=drawn), torch.randn(64, 8, generator=drawn)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        how = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "adjust_lr_fn": "original"}
        return torch.optim.Muon(list(params), **how)


class Words(unisono.TrainingStep):
    """A small Llama on rows of which the first tokens are no targets."""

    clip = 0.5

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes)).double()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)


class Rows(Words):
    def batch(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        ids = torch.randint(2, 32, (2, 9), generator=drawn)
        first = torch.randint(2, 8, (2, 1), generator=drawn)
        labels = torch.where(torch.arange(9)[None] < first, -100, ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(**batch).loss

    def weight(self, batch: Any) -> float:
        return float((batch["labels"][:, 1:] != -100).sum())


class Examples(Words):
    def batch(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        lengths = torch.randint(4, 10, (2,), generator=drawn).tolist()
        rows = [torch.randint(2, 32, (length,), generator=drawn).tolist() for length in lengths]
        return [{"input_ids": ids, "completion_mask": [0, 0] + [1] * (len(ids) - 2)} for ids in rows]

    def loss(self, model: Any, batch: Any) -> Tensor:
        losses = []
        for example in batch:
            ids, mask = torch.tensor(example["input_ids"]), torch.tensor(example["completion_mask"]) > 0
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses.append(cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum"))
        return torch.stack(losses).sum() / self.weight(batch)

    def weight(self, batch: Any) -> float:
        return float(sum(sum(example["completion_mask"][1:]) for example in batch))


class Tree(unisono.TrainingStep):
    """A regression in JAX."""

    def model(self) -> Any:
        import jax

        keys = jax.random.split(jax.random.key(0), 2)
        return {"a": jax.random.normal(keys[0], (6, 8)), "b": jax.random.normal(keys[1], (8,))}

    def batch(self, number: int) -> Any:
        drawn = np.random.default_rng(number)
        return drawn.normal(size=(5, 6)), drawn.normal(size=(5,))

    def loss(self, model: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        return jnp.mean((jnp.tanh(batch[0] @ model["a"]) @ model["b"] - batch[1]) ** 2)


class UnevenTree(Tree):
    def weight(self, batch: Any) -> float:
        return 1.0 + float(batch[1][0] > 0)


class TreeSummed(Tree):
    """Gradients of all micro-batches are added up."""

    def train(self, place: Any) -> Any:
        import jax

        grads = [jax.grad(self.loss)(place.model, batch) for batch in place.batches]
        return jax.tree.map(lambda *g: sum(g), *grads)


# Wrong uses of a stack -----------------------------------------------------------------------------------------------


class StepsEachMicroBatch(Decaying):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            self.loss(place.model, batch).backward()
            place.optimizer.step()
            place.optimizer.zero_grad()


class NeverClips(Decaying):
    def train(self, place: Any) -> Any:
        place.clip = 0.0
        return NotImplemented


class NeverSynced(Digits):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            with place.model.no_sync():
                (self.loss(place.model, batch) / len(place.batches)).backward()
        place.optimizer.step()
        place.optimizer.zero_grad()


class MeansOfMeans(Uneven):
    def train(self, place: Any) -> Any:
        place.weights, place.total_weight = [1.0] * place.micros, float(place.micros * place.groups)
        return NotImplemented


class NeverZeroed(Digits):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            (self.loss(place.model, batch) / len(place.batches)).backward()
        place.optimizer.step()


# Loops that return weights -------------------------------------------------------------------------------------------

RANKS, MICROS = 2, 2


def loop(
    rank: Any, step: unisono.TrainingStep, optimizer: Any = None, steps: int = 2, **how: Any
) -> list[Any]:
    """A loop by hand. optimizer(params): in the place of the step's. each: whether it steps after each micro-batch."""
    torch.manual_seed(0)
    model = step.model()
    inner = (optimizer or step.optimizer)(list(model.parameters()))
    weights = []
    for number in range(steps):
        first = (number * rank.world + rank.rank) * MICROS
        for micro in range(how.get("first", 0), MICROS):
            each = how.get("each", False)
            (step.loss(model, step.batch(first + micro)) / (1 if each else MICROS)).backward()
            if micro == MICROS - 1 or each:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(rank.world)
                if step.clip and not how.get("loose"):
                    nn.utils.clip_grad_norm_(model.parameters(), step.clip)
                inner.step()
                inner.zero_grad()
        weights.append(copy.deepcopy(dict(model.named_parameters())))
    return weights


def right(rank: Any) -> list[Any]:
    return loop(rank, Decaying())


def without_decay(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0))


def another_rate(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.05))


def each_micro_batch(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), each=True)


def loose(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), loose=True)


def plain_momentum(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01))


def first_lost(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), first=1)


def muon_is_sgd(rank: Any) -> list[Any]:
    return loop(rank, Muon(), lambda params: torch.optim.SGD([p for p in params if p.dim() == 2], lr=1e-2))


def muon_right(rank: Any) -> list[Any]:
    return loop(rank, Muon())


def last_weights(rank: Any) -> Any:
    return loop(rank, Decaying())[-1]


def adam_for_adamw(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), lambda params: torch.optim.Adam(params, lr=1e-3))
