"""The top 12.5 % of 4 M and 40 M scores, against numpy's argpartition and torch's topk.

The peers return the rows in no order and count zeros in; only top_rows sorts them by row id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bounds
import numpy as np
import torch
from paired import Comparison, Contender, Settings

from cpr_ext._native import native

NUM_ROWS = 4_000_000
#: Scores of n rows, by what they are like; those of `COUNTS` are what training counts.
SCORES: dict[str, Callable[[Any, int], np.ndarray]] = {
    "zipf_counts": lambda random, n: np.bincount(
        (random.zipf(1.1, 2 * n) - 1) % n, minlength=n
    ).astype(np.uint32),
    "poisson_counts": lambda random, n: random.poisson(1.5, n).astype(np.uint32),
    "large_counts": lambda random, n: random.integers(0, 2**31, n).astype(np.uint32),
    "changes": lambda random, n: np.abs(random.standard_normal(n)).astype(np.float32),
}
COUNTS = ("zipf_counts", "poisson_counts", "large_counts")


def comparisons(settings: Settings) -> Iterator[Comparison]:
    num_rows = 10_000 if settings.tiny else NUM_ROWS
    for name, make in SCORES.items():
        scores = make(np.random.default_rng(0), num_rows)
        yield _comparison(name, scores, rounds=12)
        if name in COUNTS:
            # Ten times over: the same distribution, without minutes of drawing it.
            yield _comparison(name, np.tile(scores, 10), rounds=3)


def _comparison(name: str, scores: np.ndarray, *, rounds: int) -> Comparison:
    num_rows = len(scores)
    k = num_rows // 8
    signed = torch.from_numpy(scores if scores.dtype == np.float32 else scores.astype(np.int32))
    contenders = []
    for threads in (1, 2):
        pool = native.ThreadPool(num_threads=threads)
        contenders.append(
            Contender(
                f"top_rows[{name}-{threads}]",
                lambda pool=pool: native.top_rows(scores, k, pool),
                facts={"threads": threads},
            )
        )
    contenders += [
        Contender("argpartition", lambda: np.argpartition(scores, num_rows - k)[-k:], "peer"),
        Contender("topk", lambda: torch.topk(signed, k, sorted=False), "peer"),
        Contender("reading the scores once", lambda: bounds.read(scores), "bound"),
    ]
    facts = {"num_rows": num_rows, "scores": name, "is_counts": name in COUNTS}
    return Comparison(f"top {k} of {num_rows} {name}", contenders, rounds, facts)
