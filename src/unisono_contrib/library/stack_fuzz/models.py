"""Small models of many kinds, for steps that are drawn: what each is there for says its docstring.

Rows R, length T, vocabulary V. `Numbers` take floats [R, 6] and have a target for each row; `Tokens` take tokens [R, T]
and have a target for each token. Logits [..., V].
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, one_hot, softmax

WIDTH, HIDDEN, VOCABULARY, LENGTH = 6, 8, 10, 5
NOTHING = -100  # a target that counts for nothing


def mean_loss(logits: Tensor, labels: Tensor, targets: Any = None) -> Tensor:
    """The loss summed over targets, by their number; by `targets`, if that is a number or a tensor."""
    summed = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=NOTHING, reduction="sum")
    return summed / ((labels != NOTHING).sum().clamp(min=1) if targets is None else targets)


class DrawnModel(nn.Module):
    """A model that returns logits, or {"loss", "logits"} where it is handed labels, as those of transformers do."""

    tokens = True

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **keywords: Any) -> Any:
        """keywords: `num_items_in_batch` of a Trainer, by which the summed loss is divided."""
        logits = self.logits(inputs)
        if labels is None:
            return logits
        return {"loss": mean_loss(logits, labels, keywords.get("num_items_in_batch")), "logits": logits}

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        raise NotImplementedError

    @staticmethod
    def uses_all(number: int, step: int) -> bool:
        """Return whether the micro-batch of this number, of this step, uses all parameters."""
        return True


class DrawnMlp(DrawnModel, nn.Sequential):
    """Nothing but layers."""

    tokens = False

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, HIDDEN), *(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))]
        nn.Sequential.__init__(
            self, *(part for layer in layers for part in (layer, nn.GELU())), nn.Linear(HIDDEN, VOCABULARY)
        )

    def logits(self, inputs: Tensor) -> Tensor:
        return nn.Sequential.forward(self, inputs)


class DrawnNorms(DrawnModel):
    """Norms, a buffer that is read, and one that is written and says nothing."""

    tokens = False
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN)
        self.last, self.head = nn.LayerNorm(HIDDEN, bias=False), nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def logits(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.last(gelu(self.norm(self.inner(inputs))) * self.scale))


class DrawnFrozen(DrawnMlp):
    """A layer that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        next(self.children()).requires_grad_(False)


class DrawnTwice(DrawnModel):
    """A layer that is used twice, one after the other."""

    tokens = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def logits(self, inputs: Tensor) -> Tensor:
        x = gelu(self.inner(inputs))
        return self.head(gelu(self.again(gelu(self.again(x)))))


class DrawnGpt(DrawnModel):
    """A block of attention with biases and norms, between embeddings that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, HIDDEN), AttentionBlock()
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) / 4)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def logits(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(inputs) + self.positions)))


class AttentionBlock(nn.Module):
    """Two heads that look back, and a perceptron; [R, T, C] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1))  # [R, T, 3, heads, C / heads]
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(ahead, -torch.inf)
        x = x + self.out((softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))


class DrawnMoe(DrawnModel):
    """Experts of which a gate chooses one for each token: most take the first, and an expert may have no token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([0.8, 0.0, -0.8]))

    def logits(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs).flatten(0, 1)
        chances = softmax(self.gate(x), -1)
        chosen = one_hot(chances.argmax(-1), len(self.experts)).bool()
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = chosen[:, number].nonzero()[:, 0]
            y = y.index_add(0, at, gelu(expert(x[at])) * chances[at, number, None])
        return self.head(x + y).unflatten(0, inputs.shape)


class DrawnIdle(DrawnModel):
    """A layer that all batches of every other step leave out. The sign of a row's first number says so."""

    tokens = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def logits(self, inputs: Tensor) -> Tensor:
        x = gelu(self.inner(inputs))
        return self.head(x + gelu(self.side(x)) if inputs[0, 0] > 0 else x)

    @staticmethod
    def uses_all(number: int, step: int) -> bool:
        return step % 2 == 0


class DrawnUnused(DrawnIdle):
    """A layer that some micro-batches leave out, others on each rank."""

    @staticmethod
    def uses_all(number: int, step: int) -> bool:
        return number % 3 != 1
