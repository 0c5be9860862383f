"""DLRM: embeddings of categories, an MLP over dense features, their pairwise dot products, an MLP on top."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    """Dense features [B, 13], categories [B, F] (int64), clicks [B] -> mean binary cross entropy, a scalar."""

    def __init__(self, categories: int, tables: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(categories, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + pairs.shape[1], hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        embedded = (table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True))
        features = torch.stack((bottom, *embedded), dim=1)
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat((bottom, products), dim=1)).flatten()
        return F.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype))
