"""How often rows may be restored from rounded snapshots before AUC falls: the rule of restores.

    python bench/precision_restores.py [--data movietweetings:DIR] [--seeds 20] [--minutes 7]

Every row is rounded at evenly spaced steps, as if all shards were lost there and recovered from a
snapshot of that very step. So nothing is lost but what rounding loses. Running it again continues;
--minutes ends it after a seed. Results in bench/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from precision_accuracy import Model, command

from cpr_ext.dlrm.evaluation import evaluate
from cpr_ext.emulation.machine import describe_machine
from cpr_ext.emulation.run_strategy import Training
from cpr_ext.emulation.statistics import estimate
from cpr_ext.state.precision import round_rows

RESULTS = Path(__file__).resolve().parent / "results"
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="as for cpr emulate")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    training = Training(options.data)
    file = RESULTS / f"precision_restores_{options.data.partition(':')[0]}.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    done = {run["seed"] for run in runs}
    for seed in range(options.seeds):
        if seed in done or time.monotonic() - started > 60 * options.minutes:
            continue
        runs.append(play(training, seed))
        print(f"seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
        plain = {
            "command": command(Path(__file__).name),
            "machine": describe_machine(),
            "summary": summarize(runs),
        }
        head = json.dumps(plain, indent=1).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(run) for run in runs)
        file.write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')
    for row in summarize(runs):
        loss = row["auc_loss"]
        print(
            f"{row['precision']} {row['restores']:>3} restores: AUC loss {1e3 * loss['mean']:.3f} "
            f"[{1e3 * loss['low']:.3f}, {1e3 * loss['high']:.3f}] e-3, "
            f"{row['auc_loss_percent']:.4f} %"
        )


if __name__ == "__main__":
    main()
