"""The deep learning recommendation model of Naumov et al. 2019 (arXiv:1906.00091)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from cpr_ext.wings.lab.dlrm.batch import Batch, DataSource
from cpr_ext.wings.lab.dlrm.presets import ModelPreset


def initial_rows(
    num_embeddings: int, num_rows: int, dim: int, generator: torch.Generator
) -> torch.Tensor:
    """Return fresh values for `num_rows` rows of a table that has `num_embeddings` rows in all.

    Drawn from uniform(-sqrt(1/num_embeddings), sqrt(1/num_embeddings)), the initialisation of the
    published DLRM code. A lost row range is wiped with the values the table could have begun with.

    Returns:
        float32 (num_rows, dim), on the generator's device.
    """
    bound = math.sqrt(1.0 / num_embeddings)
    rows = torch.empty(num_rows, dim, device=generator.device)
    return rows.uniform_(-bound, bound, generator=generator)


def _mlp(widths: Sequence[int], generator: torch.Generator, *, relu_last: bool) -> nn.Sequential:
    # Published: weights normal(0, sqrt(2 / (in + out))), biases normal(0, sqrt(1 / out)).
    layers: list[nn.Module] = []
    for position, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        # By way of "meta", so that torch's own initialisation draws no global random numbers.
        layer = nn.Linear(fan_in, fan_out, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0.0, math.sqrt(2.0 / (fan_in + fan_out)), generator=generator)
            layer.bias.normal_(0.0, math.sqrt(1.0 / fan_out), generator=generator)
        layers.append(layer)
        if relu_last or position < len(widths) - 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Bottom MLP, one embedding bag per table, pairwise dot products, top MLP.

    With `num_dense` 0 there is no bottom MLP: the embeddings interact among themselves and the
    top MLP sees their dot products alone.

    Args:
        table_names: one name per table; a name is an attribute of a module, so no dots.
        num_embeddings: rows of each table.
        embedding_dim: columns of every table.
        num_dense: continuous features per sample.
        bottom_mlp: hidden widths and output of the bottom MLP, without its input; the output must
            equal `embedding_dim`. Ignored when `num_dense` is 0.
        top_mlp: hidden widths and output of the top MLP, without its input; must end in 1.
        seed: of the initial values; the same seed gives the same model.

    Attributes:
        tables: `nn.ModuleDict` of `nn.EmbeddingBag` by table name; gradients are sparse.
        bottom: `nn.Sequential`, or None when `num_dense` is 0.
        top: `nn.Sequential`.
    """

    def __init__(
        self,
        *,
        table_names: Sequence[str],
        num_embeddings: Sequence[int],
        embedding_dim: int,
        num_dense: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        seed: int = 0,
    ) -> None:
        super().__init__()
        num_vectors = len(table_names) + (1 if num_dense else 0)
        generator = torch.Generator().manual_seed(seed)
        self.tables = nn.ModuleDict()
        for name, rows in zip(table_names, num_embeddings, strict=True):
            weight = initial_rows(rows, rows, embedding_dim, generator)
            self.tables[name] = nn.EmbeddingBag(
                rows, embedding_dim, mode="sum", sparse=True, _weight=weight
            )
        self.bottom: nn.Sequential | None = None
        if num_dense:
            self.bottom = _mlp((num_dense, *bottom_mlp), generator, relu_last=True)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        top_input = num_pairs + (embedding_dim if num_dense else 0)
        self.top = _mlp((top_input, *top_mlp), generator, relu_last=False)
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self._pairs: torch.Tensor
        self.register_buffer("_pairs", row * num_vectors + column, persistent=False)

    @classmethod
    def from_preset(cls, preset: ModelPreset, source: DataSource, *, seed: int = 0) -> DLRM:
        """Return a model of the preset's widths for the tables and dense features of `source`."""
        return cls(
            table_names=source.table_names,
            num_embeddings=source.num_embeddings,
            embedding_dim=preset.embedding_dim,
            num_dense=source.num_dense,
            bottom_mlp=preset.bottom_mlp[1:],
            top_mlp=preset.top_mlp,
            seed=seed,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits of the labels being 1, float32 (batch_size,)."""
        vectors = [
            bag(indices, offsets)
            for bag, indices, offsets in zip(
                self.tables.values(), batch.indices, batch.offsets, strict=True
            )
        ]
        bottom = None if self.bottom is None else self.bottom(batch.dense)
        if bottom is not None:
            vectors.insert(0, bottom)
        stacked = torch.stack(vectors, dim=1)  # (batch_size, num_vectors, embedding_dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self._pairs)  # strict lower triangle
        top_input = pairs if bottom is None else torch.cat((bottom, pairs), dim=1)
        logits: torch.Tensor = self.top(top_input)
        return logits.squeeze(1)
