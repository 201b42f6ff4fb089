"""Pictures on a straight path from noise: what flow matching learns from (Lipman et al., "Flow matching for generative
modeling", 2023, https://arxiv.org/abs/2210.02747; here without noise at the picture's end).

A sample is (1 - t) · noise + t · picture, its target the velocity picture - noise. Noise, time and whether the class is
left out are functions of (seed, position of the sample in the run), so every plan draws the same.

Shapes: B batch, C colours, T patches, P values of a patch.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.models.noise import Dropout, Noise, site_of
from unisono.train.data.dataset import Corpus, Dataset, Foreseen, fetched, numbers_at
from unisono_contrib.models.dit import DiTConfig


def uniforms(name: str, shape: tuple[int, ...], noise: Noise) -> Tensor:
    """Numbers in (0, 1) of the shape [B, ...], float64, that depend on seed, name, sample and place alone."""
    return (Dropout(0.0, site_of(name)).bits(torch.Size(shape), noise).double() + 0.5) / 2.0**32


def normals(name: str, shape: tuple[int, ...], noise: Noise) -> Tensor:
    """As `uniforms`, normal."""
    return torch.special.ndtri(uniforms(name, shape, noise))


def patched(pictures_BCYX: Tensor, patch: int) -> Tensor:
    """[B, C, Y, X] → [B, T, P], patches row by row."""
    return F.unfold(pictures_BCYX, patch, stride=patch).transpose(1, 2)


def unpatched(patches_BTP: Tensor, shape: tuple[int, ...], patch: int) -> Tensor:
    """[B, T, P] → [B, C, Y, X]. shape: of a picture."""
    return F.fold(patches_BTP.transpose(1, 2), shape[1:], patch, stride=patch)


def conditioned(patches_BTP: Tensor, time_B: Tensor, label_B: Tensor) -> Tensor:
    """What the model reads: patches, each with the time and the class of its picture, [B, T, P + 2]."""
    more = torch.stack((time_B, label_B), -1).to(patches_BTP.dtype)
    return torch.cat((patches_BTP, more[:, None].expand(-1, patches_BTP.shape[1], -1)), -1)


@dataclass(frozen=True, slots=True)
class Noisy:
    """Pictures of a dataset under way from noise. inner: inputs [n, C, Y, X] in 0..1, targets the class. classes: how
    many; this number stands for none."""

    inner: Dataset
    config: DiTConfig
    classes: int

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def is_slow(self) -> bool:
        """As the dataset's."""
        return isinstance(self.inner, Foreseen) and self.inner.is_slow

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """As the dataset's."""
        return numbers_at(self.inner, seed, positions)

    def expect(self, seed: int, position: int) -> None:
        """As the dataset's."""
        if isinstance(self.inner, Foreseen):
            self.inner.expect(seed, position)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As the first visit under seed 0 would: for whoever asks for a sample to see its shape."""
        return self._noisy(0, indices, self.inner.fetch(indices))

    def fetch_at(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs float32 [n, T, P + 2], as `conditioned` says, targets float32 [n, T, P]."""
        return self._noisy(seed, positions, fetched(self.inner, seed, positions, indices))

    def _noisy(self, seed: int, positions: np.ndarray, read: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (pictures, labels), config = read, self.config
        end_BTP, at = patched(2.0 * pictures - 1.0, config.patch), Noise(seed, torch.from_numpy(positions))
        begin_BTP = normals("noise", tuple(end_BTP.shape), at).float()
        single = (len(labels), 1)
        time_B = (
            uniforms("time", single, at)
            if config.time == "uniform"
            else normals("time", single, at).sigmoid()
        )
        label_B = torch.where(uniforms("label", single, at)[:, 0] < config.label_drop, self.classes, labels)
        time_B11 = time_B[..., None].float()
        now_BTP = (1.0 - time_B11) * begin_BTP + time_B11 * end_BTP
        return conditioned(now_BTP, time_B11[:, 0, 0], label_B), end_BTP - begin_BTP


def prepared(config: DiTConfig, corpus: Corpus) -> Corpus:
    """A corpus of pictures as a diffusion transformer reads it."""
    train, val = (
        Noisy(each, config, config.classes or corpus.classes) for each in (corpus.train, corpus.val)
    )
    return replace(corpus, train=train, val=val)
