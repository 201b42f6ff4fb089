"""Real input, dealt as virtual shards: sources, the order of samples, and the batches of one rank."""

from unisono.train.data.dataset import Corpus, Dataset, Images, TokenWindows, require_samples
from unisono.train.data.feed import Feed, Micro, Permuted
from unisono.train.data.order import sample_ids, samples_at
from unisono.train.data.sources import load

__all__ = [
    "Corpus",
    "Dataset",
    "Feed",
    "Images",
    "Micro",
    "Permuted",
    "TokenWindows",
    "load",
    "require_samples",
    "sample_ids",
    "samples_at",
]
