"""How often production models access which rows, and draws that follow it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_STATISTICS = Path(__file__).with_name("access_locality.json")


@dataclass(frozen=True)
class AccessSkew:
    """Shares of rows and of accesses per bucket of similarly hot rows, hottest bucket first.

    Attributes:
        row_share: float64 (num_buckets,), share of a table's rows in each bucket; sums to 1.
        access_share: float64 (num_buckets,), share of the accesses they take; sums to 1.
    """

    row_share: npt.NDArray[np.float64]
    access_share: npt.NDArray[np.float64]

    def ranks(self, uniform: npt.NDArray[np.float64], num_embeddings: int) -> npt.NDArray[np.int64]:
        """Return row ranks, 0 the hottest, for numbers drawn uniformly from [0, 1).

        A number picks its bucket by access share. Its remainder picks a row of the bucket; all rows
        of a bucket are equally likely. A pure function of `uniform`, which it keeps
        sorted: smaller numbers give hotter rows.

        Returns:
            int64, the shape of `uniform`, each in [0, num_embeddings).
        """
        access_edge = np.concatenate(([0.0], np.cumsum(self.access_share)))
        row_edge = np.concatenate(([0.0], np.cumsum(self.row_share)))
        position = np.interp(uniform, access_edge, row_edge)
        return np.minimum((position * num_embeddings).astype(np.int64), num_embeddings - 1)


def production_skew(year: str = "2022") -> AccessSkew:
    """Return the skew measured over all tables of a production model of Meta, in `year`.

    From the published statistics of facebookresearch/dlrm_datasets (access_locality.json, which
    names its source and licence). Row shares are published with three digits. Where that rounds to
    0, the share is restored as accesses / mean accesses per row. That mean is the geometric mean of
    the bucket's bounds. Rows that a batch never accessed are not in the statistics, so the shares
    are of the rows in use.
    """
    statistics = json.loads(_STATISTICS.read_text(encoding="utf-8"))
    figures = statistics["years"][year]
    accesses_per_row = figures["accesses"] / figures["distinct_rows"]
    row_shares = []
    lower = 0.5
    for upper, row_share, access_share in zip(
        statistics["bucket_upper"], figures["row_share"], figures["access_share"], strict=True
    ):
        typical = math.sqrt(lower * (upper if upper is not None else 4 * lower))
        row_shares.append(row_share or access_share * accesses_per_row / typical)
        lower = upper
    row_array = np.array(row_shares[::-1])
    access_array = np.array(figures["access_share"][::-1])
    return AccessSkew(row_array / row_array.sum(), access_array / access_array.sum())
