"""Drawing a token, and what its log-probability is.

Who draws does not matter: token t of sequence g of prompt number p is a pure function of the logits and of
(seed, p, g, t), by a counter-based hash (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

Shapes: n sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from unisono.train.data.order import mix


def log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the tokens; logits [..., V], tokens int64 [...] → [...], in fp32 or wider.

    Sampler and trainer both compute it here, row by row, so that equal logits give equal bits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def uniforms(seed: int, numbers: np.ndarray, members: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Uniform in [0, 1), float64 [n], of prompts with these numbers, members of groups, and places in sequences."""
    with np.errstate(over="ignore"):
        key = mix(np.full(len(numbers), seed, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        for part in (numbers, members, places):
            key = mix(key ^ mix(part.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_nV: Tensor, uniform_n: np.ndarray, temperature: float) -> Tensor:
    """Tokens int64 [n] from softmax(logits / temperature), by inversion in float64."""
    chances = (logits_nV.double() / temperature).softmax(-1).cumsum(-1)
    at = torch.from_numpy(uniform_n).to(logits_nV.device).unsqueeze(-1) * chances[:, -1:]
    return torch.searchsorted(chances, at, right=True).squeeze(-1).clamp_(max=logits_nV.shape[-1] - 1)
