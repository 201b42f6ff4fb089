"""Small federated runs for tests: digits, one hidden layer, float64."""

from typing import Any

from torch import Tensor

from unisono.config import load as load_recipe
from unisono.config import resolve
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.server import Federation, federation_of

FLAGS = {
    "model.kind": "mlp",
    "model.hidden": "8",
    "data.source": "digits",
    "train.dtype": "float64",
    "train.optimizer": "sgd",
    "train.momentum": "0",
    "train.lr": "0.1",
    "train.lr_schedule": "constant",
    "train.weight_decay": "0",
    "train.clip": "0",
    "train.global_batch": "16",
    "train.eval_batches": "1",
    "federated.clients": "20",
    "federated.rounds": "4",
    "federated.participation": "0.2",
    "federated.dropout": "0.2",
    "federated.local_steps": "2",
    "federated.split": "dirichlet:alpha=0.5",
}


def recipe_of(**keys: Any):
    """The resolved recipe; a key is written `federated__clients=5`."""
    flags = FLAGS | {key.replace("__", "."): str(value) for key, value in keys.items()}
    if flags["train.optimizer"] != "sgd":
        del flags["train.momentum"]
    loaded = load_recipe(None, list(flags.items()))
    train = loaded.recipe.train.model_copy(
        update={"steps": loaded.recipe.federated.rounds, "micro_batch": loaded.recipe.train.global_batch}
    )
    return resolve(loaded.recipe.model_copy(update={"train": train}), loaded.plan, 1)


def federated(corpus: Corpus | None = None, clients_of: Any = None, **keys: Any) -> Federation:
    resolved = recipe_of(**keys)
    corpus = corpus or load(resolved.recipe.data, resolved.recipe.model)
    return federation_of(resolved, corpus, clients_of=clients_of)


def weights_after(rounds: int, corpus: Corpus | None = None, **keys: Any) -> Tensor:
    """The global weights [d]."""
    federation = federated(corpus, **keys)
    for _ in range(rounds):
        federation.play_round()
    return federation.weights
