"""A user's own members of the families that a recipe chooses from, each with one fault."""

import torch

from unisono.spec.model import Facts
from unisono.train.losses.cross_entropy import CrossEntropy
from unisono.train.metrics.accuracy import Accuracy
from unisono.train.optim.adamw import AdamW
from unisono.train.optim.sgd import Momentum
from unisono.train.rates.linear import Straight
from unisono_contrib.models.mlp import MLPConfig
from unisono_contrib.train.data.sources.digits import Handwriting


class Greedy(AdamW):
    """Keeps more than it says."""

    name = "greedy"

    @property
    def kept(self):
        return 1


class Nameless(Momentum):
    """Names its velocity otherwise than the live optimiser."""

    name = "nameless"

    def state(self, parameter):
        return {"velocity": torch.zeros_like(parameter)}


class Lawless(AdamW):
    """Its law has another epsilon than its step."""

    name = "lawless"

    def law(self, update, weight, state, grad, error):
        return AdamW(eps=1e-2).law(update, weight, state, grad, error)


class Apart(Momentum):
    """Says that its decay is apart from the gradient."""

    name = "apart"
    couples = False


class Rising(Straight):
    """Ends above its peak."""

    name = "rising"

    def after(self, done, lr):
        return lr * (1 + done)


class Mean(CrossEntropy):
    """A mean over targets, which does not add up."""

    name = "mean"

    def bind(self):
        summed = super().bind()
        return lambda logits, targets: summed(logits, targets) / targets.numel()


class Share(Accuracy):
    """Divides before ranks have met."""

    name = "share"

    def count(self, logits, targets):
        return super().count(logits, targets) / targets.numel()


class Misread(Handwriting):
    """Declares more classes than there are."""

    name = "misread"

    def facts(self, tokenizer):
        return Facts(classes=11, sample_shape=(1, 8, 8))

    def load(self, data, model):
        return Handwriting().load(data, model)


class Deeper(MLPConfig):
    """Declares a block more than it has."""

    name = "deeper"

    @property
    def depth(self):
        return len(self.hidden) + 1
