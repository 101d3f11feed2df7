"""How often rows may be restored from rounded snapshots before AUC falls: the rule of restores.

    python bench/precision_restores.py [--data movietweetings:DIR] [--seeds 20] [--minutes 7]

Every row is rounded at evenly spaced steps, as if all shards were lost there and recovered from a
snapshot of that very step. So nothing is lost but what rounding loses. Running it again continues;
--minutes ends it after a seed. Results in bench/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from precision_accuracy import Model
from precision_seeds import run_seeds

from cpr_ext.lab.dlrm.evaluation import evaluate
from cpr_ext.lab.emulation.run_strategy import Training
from cpr_ext.lab.emulation.statistics import estimate
from cpr_ext.state.precision import round_rows

ARMS = (("int4", 1), ("int4", 3), ("int4", 20), ("int4", 100), ("int8", 20), ("int8", 100))


def play(training: Training, seed: int) -> dict[str, Any]:
    """Train a seed without restores, and once for every arm."""
    whole = train(training, seed, "float32", 0)
    losses = [whole - train(training, seed, *arm) for arm in ARMS]
    return {"seed": seed, "auc": whole, "auc_losses": losses}


def train(training: Training, seed: int, precision: str, restores: int) -> float:
    source = training.open(seed)
    total = training.clock(source, 1.0).total_steps
    due = {round(total * (number + 1) / (restores + 1)) for number in range(restores)}
    model = Model(training, seed)
    batches = source.train_batches(model.settings.batch_size, epoch=0, seed=seed)
    for step, batch in enumerate(batches, start=1):
        model.step(batch)
        if step in due:
            with torch.no_grad():
                for table in model.tables:
                    table.weight.copy_(round_rows(table.weight, precision))
    return evaluate(model.net, source).auc


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "precision": precision,
            "restores": restores,
            "auc_loss": vars(estimate([run["auc_losses"][number] for run in runs])),
            "auc_loss_percent": 100
            * estimate([run["auc_losses"][number] / run["auc"] for run in runs]).mean,
        }
        for number, (precision, restores) in enumerate(ARMS)
    ]


def main() -> None:
    for row in run_seeds(__file__, __doc__, play, summarize):
        loss = row["auc_loss"]
        print(
            f"{row['precision']} {row['restores']:>3} restores: AUC loss {1e3 * loss['mean']:.3f} "
            f"[{1e3 * loss['low']:.3f}, {1e3 * loss['high']:.3f}] e-3, "
            f"{row['auc_loss_percent']:.4f} %"
        )


if __name__ == "__main__":
    main()
