"""The recommender: tables of embeddings beside layers on numbers, all pairs of both, and layers on these.

Shapes: B batch, F numbers of a sample, T tables, L rows that a sample reads of each, D width of a row, P = T(T + 1)/2
pairs, H width of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.init import Rule
from unisono.models.noise import Noise
from unisono.spec.layout import Anatomy
from unisono_contrib.models.dlrm import DLRMConfig


class EmbeddingTables(nn.ModuleList):
    """Indices [B, T, L] → sums of the rows that they name [B, T, D]. Gradients hold the rows that were read alone."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__(nn.Embedding(count, width, sparse=True) for count in rows)

    def forward(self, index_BTL: Tensor) -> Tensor:
        rows = [table(index_BL).sum(1) for table, index_BL in zip(self, index_BTL.unbind(1), strict=True)]
        return torch.stack(rows, 1)


class ClickStem(nn.Module):
    """A sample as one line of int64 [B, F + T·L], the bits of F float64 and then indices → (numbers [B, F], rows
    [B, T, D])."""

    def __init__(self, dense: int, rows: Sequence[int], lookups: int, width: int) -> None:
        super().__init__()
        self.dense, self.lookups = dense, lookups
        self.tables = EmbeddingTables(rows, width)

    def forward(self, inputs: Tensor, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
        numbers, index = inputs.split((self.dense, inputs.shape[1] - self.dense), 1)
        rows_BTD = self.tables(index.unflatten(1, (-1, self.lookups)))
        return numbers.contiguous().view(torch.float64).to(rows_BTD.dtype), rows_BTD


class Perceptron(nn.Module):
    """[..., H of before] → [..., H of the last]: layers with ReLU after each."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Interaction(nn.Module):
    """(numbers [B, F], rows [B, T, D]) → the features that layers make of the numbers, beside the dot products of all
    pairs of features and rows [B, D + P]."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.bottom = Perceptron(widths)

    def forward(self, x: tuple[Tensor, Tensor], noise: Noise | None = None) -> Tensor:
        numbers_BF, rows_BTD = x
        x_BD = self.bottom(numbers_BF)
        both_BID = torch.cat((x_BD.unsqueeze(1), rows_BTD), 1)
        products_BII = torch.bmm(both_BID, both_BID.transpose(1, 2))
        count = both_BID.shape[1]
        i, j = torch.tril_indices(count, count, -1, device=x_BD.device)
        return torch.cat((x_BD, products_BII[:, i, j]), 1)


class ClickHead(nn.Module):
    """[B, H] → scores of no click and of a click [B, 2]: 0 and z. Their cross-entropy is the binary one of z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, x_BH: Tensor) -> Tensor:
        return F.pad(self.out(x_BH), (1, 0))


class DLRM(Chain):
    """`forward(inputs int64 [B, F + T·L]) → scores [B, 2]`; see ClickStem and ClickHead. rows: of each table."""

    def __init__(self, config: DLRMConfig, rows: Sequence[int]) -> None:
        width, count = config.d_table, len(rows) + 1
        above = (width + count * (count - 1) // 2, *config.top)
        super().__init__(
            ClickStem(config.n_dense, rows, config.lookups, width),
            nn.ModuleList(
                (Interaction((config.n_dense, *config.bottom, width)), *map(Perceptron, pairwise(above)))
            ),
            ClickHead(above[-1]),
            Anatomy(tables="stem.tables", table_cut=config.table_sharding),
        )

    def initial_rules(self) -> Mapping[str, Rule]:
        """As in the authors' program: rows uniform within 1 / √rows; layers normal, with the variance 2 / (inputs +
        outputs), their biases with 1 / outputs."""
        rules: dict[str, Rule] = {}
        for name, p in self.named_parameters():
            if name.startswith("stem."):
                rules[name] = ("uniform", 1.0 / math.sqrt(p.shape[0]))
            else:
                variance = 2.0 / sum(p.shape) if p.dim() > 1 else 1.0 / p.shape[0]
                rules[name] = ("normal", math.sqrt(variance))
        return rules
