"""What recovery from rounded partial snapshots over a float32 base does to AUC.

    python bench/precision_accuracy.py [--data movietweetings:DIR] [--seeds 20] [--minutes 7]

Half of the shards are lost in the last tenth of the training. Each seed trains once: saves change
nothing in training, so every arm continues from a copy of the model at the failure. An arm is a
precision and an interval: float32's, or one that writes the same bytes per hour as float32's.

The choice of rows is the library's, and so is the rounding; snapshots are kept in memory.
Running it again continues; --minutes ends it after a seed. Results in bench/results/.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from precision_seeds import run_seeds
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr_ext.lab.dlrm.batch import Batch
from cpr_ext.lab.dlrm.evaluation import evaluate
from cpr_ext.lab.dlrm.model import DLRM
from cpr_ext.lab.dlrm.optimizers import build_optimizers
from cpr_ext.lab.dlrm.presets import find_preset
from cpr_ext.lab.emulation.run_strategy import Training
from cpr_ext.lab.emulation.statistics import estimate
from cpr_ext.policy.precision import id_bytes, weight_bytes
from cpr_ext.saving.priorities import MostFrequentlyUsed, make_tracker
from cpr_ext.saving.selection import Selector
from cpr_ext.state.precision import EXACT, encode_rows, round_rows
from cpr_ext.state.table import Table, find_tables, prioritized_tables, shard_row_range

NUM_SHARDS, NUM_LOST = 8, 4
FRACTION = 0.125
# Save intervals of float32, as shares of the training; 0.1 is that of the paper's abstract.
SHARES = (0.2, 0.1, 0.05)
PRECISIONS = ("float32", "float16", "int8", "int4")
STATE_BYTES = 4
# Failures are drawn from a stream of their own.
FAILURE_STREAM = 0xB175


@dataclass(frozen=True)
class Arm:
    """A precision, and steps from one partial snapshot to the next.

    Attributes:
        share: interval of the float32 arm that it is compared with.
        same: what is equal there, the ``saves`` or the ``bytes``.
    """

    precision: str
    share: float
    same: str
    every_steps: int


def arms(total_steps: int, dim: int) -> list[Arm]:
    """Return all arms; a float32 arm is the reference of its share."""
    found = []
    for share in SHARES:
        every = share * total_steps
        for precision in PRECISIONS:
            found.append(Arm(precision, share, "saves", round(every)))
            if precision != EXACT:
                ratio = row_bytes(dim, precision) / row_bytes(dim, EXACT)
                found.append(Arm(precision, share, "bytes", math.ceil(every * ratio)))
    return found


def row_bytes(dim: int, precision: str) -> float:
    """Return what a row takes in a partial snapshot: weights, exact state, packed id.

    Float32 rows count with packed ids, too, although their ids take 8 bytes: so a rounded arm may
    save less often here than its bytes allow.
    """
    return weight_bytes(dim, precision) + STATE_BYTES + id_bytes("int8", FRACTION)


class Snapshots:
    """The newest saved rows of one interval: a base, and partial snapshots over it."""

    def __init__(self, model: Model, every_steps: int) -> None:
        self.every_steps = every_steps
        self.rows = [copy_rows(table) for table in model.tables]
        self.is_partial = [torch.zeros(t.num_embeddings, dtype=torch.bool) for t in model.tables]
        self.rows_written: list[int] = []
        priority, large = MostFrequentlyUsed(FRACTION), {t.name for t in model.large}
        trackers = {
            t.name: make_tracker(priority, t, t.name in large, count_updates=False)
            for t in model.tables
        }
        self._trackers = [trackers[table.name] for table in model.tables]
        self._selector = Selector(
            model.tables, trackers, priority, large, NUM_SHARDS, None, bool, bool
        )

    def count(self, batch: Batch) -> None:
        for tracker, indices in zip(self._trackers, batch.indices, strict=True):
            tracker.observe(indices)

    def save(self, tables: Sequence[Table]) -> None:
        written = 0
        for shard in range(NUM_SHARDS):
            for number, table in enumerate(tables):
                chosen = self._selector.partial(number, shard)
                ids = chosen.row_ids
                where = slice(chosen.begin, chosen.end) if ids is None else torch.from_numpy(ids)
                for name, array in table.arrays().items():
                    self.rows[number][name][where] = array[where]
                self.is_partial[number][where] = True
                chosen.take(0, chosen.num_rows)
                written += chosen.num_rows
        self.rows_written.append(written)

    def recover(self, tables: Sequence[Table], shards: Sequence[int], precision: str) -> float:
        """Write the rows of lost shards into the tables; return the share that did not fit."""
        rounded = kept_exact = 0
        for number, table in enumerate(tables):
            for shard in shards:
                begin, end = shard_row_range(table.num_embeddings, shard, NUM_SHARDS)
                for name, array in table.arrays().items():
                    array[begin:end] = self.rows[number][name][begin:end]
                here = self.is_partial[number][begin:end].nonzero().flatten() + begin
                if precision == EXACT or not len(here):
                    continue
                weight = self.rows[number]["weight"][here]
                table.weight[here] = round_rows(weight, precision)
                rounded += len(here)
                kept_exact += int((~encode_rows(weight.numpy(), precision)[1]).sum())
        return kept_exact / rounded if rounded else 0.0


class Model:
    """The model in training, which can be copied at the failure."""

    def __init__(self, training: Training, seed: int) -> None:
        torch.manual_seed(seed)
        source = training.open(seed)
        self.settings = training.options(source)["settings"]
        self.net = DLRM.from_preset(find_preset(training.model), source, seed=seed)
        self.optimizers = build_optimizers(self.net, self.settings)
        self.find_tables()

    def find_tables(self) -> None:
        self.tables = find_tables(self.net, self.optimizers)
        self.large = prioritized_tables(self.tables)

    def copy(self) -> Model:
        found = copy.copy(self)
        found.net, found.optimizers = copy.deepcopy((self.net, self.optimizers))
        found.find_tables()
        return found

    def step(self, batch: Batch) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.net(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()


class FixedSource:
    """Test batches, made once."""

    def __init__(self, source: Any) -> None:
        self._batches = list(source.test_batches(4096))

    def test_batches(self, batch_size: int) -> list[Batch]:
        return self._batches


def copy_rows(table: Table) -> dict[str, torch.Tensor]:
    return {name: array.detach().clone() for name, array in table.arrays().items()}


@dataclass(frozen=True)
class Loss:
    """After ``step``, these shards are lost."""

    step: int
    shards: tuple[int, ...]

    @classmethod
    def draw(cls, seed: int, total_steps: int) -> Loss:
        rng = np.random.default_rng([seed, FAILURE_STREAM])
        step = int(rng.uniform(0.9, 1.0) * total_steps)
        lost = rng.choice(NUM_SHARDS, NUM_LOST, replace=False)
        return cls(step, tuple(sorted(int(shard) for shard in lost)))


def play(training: Training, seed: int) -> dict[str, Any]:
    """Train a seed to its failure, and every arm from there to the end."""
    source = training.open(seed)
    total_steps = training.clock(source, 1.0).total_steps
    loss = Loss.draw(seed, total_steps)
    model = Model(training, seed)
    size = model.settings.batch_size
    dim = find_preset(training.model).embedding_dim
    played = arms(total_steps, dim)
    saved: dict[int, Snapshots] = {}
    rest = []
    for step, batch in enumerate(source.train_batches(size, epoch=0, seed=seed), start=1):
        if step > loss.step:
            rest.append(batch)
            continue
        model.step(batch)
        with torch.no_grad():
            if step == 1:
                saved = {each: Snapshots(model, each) for each in {a.every_steps for a in played}}
                continue
            for each in saved.values():
                each.count(batch)
                if (step - 1) % each.every_steps == 0:
                    each.save(model.tables)
    tests = FixedSource(source)
    whole = finish(model.copy(), rest, tests)
    rows = []
    for arm in played:
        copied, snapshots = model.copy(), saved[arm.every_steps]
        with torch.no_grad():
            kept_exact = snapshots.recover(copied.tables, loss.shards, arm.precision)
        auc, logloss = finish(copied, rest, tests)
        written = sum(snapshots.rows_written) * row_bytes(dim, arm.precision)
        rows.append(
            {
                **vars(arm),
                "auc": auc,
                "logloss": logloss,
                "snapshots": len(snapshots.rows_written),
                "bytes": written,
                "kept_exact_share": round(kept_exact, 6),
            }
        )
    return {
        "seed": seed,
        "steps": total_steps,
        "failure_step": loss.step,
        "shards": loss.shards,
        "auc": whole[0],
        "logloss": whole[1],
        "arms": rows,
    }


def finish(model: Model, rest: Sequence[Batch], tests: Any) -> tuple[float, float]:
    for batch in rest:
        model.step(batch)
    found = evaluate(model.net, tests)
    return found.auc, found.logloss


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, paired with the run without failure and with float32's arm."""
    rows = []
    for number, arm in enumerate(runs[0]["arms"]):
        mine = [run["arms"][number] for run in runs]
        reference = [
            next(a for a in run["arms"] if a["precision"] == EXACT and a["share"] == arm["share"])
            for run in runs
        ]
        losses = [run["auc"] - each["auc"] for run, each in zip(runs, mine, strict=True)]
        less = [a["auc"] - b["auc"] for a, b in zip(mine, reference, strict=True)]
        rows.append(
            {
                **{name: arm[name] for name in ("precision", "share", "same", "every_steps")},
                "auc_loss": vars(estimate(losses)),
                "auc_above_float32": vars(estimate(less)),
                "bytes_of_float32": sum(map(rate, mine)) / sum(map(rate, reference)),
                "kept_exact_share": estimate([each["kept_exact_share"] for each in mine]).mean,
            }
        )
    return rows


def rate(arm: dict[str, Any]) -> float:
    """Return the bytes written per step; fewer rows than the budget may have changed."""
    return float(arm["bytes"] / arm["snapshots"] / arm["every_steps"])


def main() -> None:
    show(run_seeds(__file__, __doc__, play, summarize))


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        loss, above = row["auc_loss"], row["auc_above_float32"]
        print(
            f"{row['share']:<5} {row['precision']:<8} same {row['same']:<6} every "
            f"{row['every_steps']:>4}  AUC loss {1e3 * loss['mean']:6.3f} "
            f"[{1e3 * loss['low']:.3f}, {1e3 * loss['high']:.3f}] e-3, above float32 "
            f"{1e3 * above['mean']:6.3f} [{1e3 * above['low']:.3f}, {1e3 * above['high']:.3f}] "
            f"e-3, bytes {row['bytes_of_float32']:.3f}, exact {row['kept_exact_share']:.4f}"
        )


if __name__ == "__main__":
    main()
