"""Play arms of bench/precision_accuracy.py through a Checkpointer: the AUC must be the same.

    python bench/precision_store.py [--data movietweetings:DIR] [--seeds 1] [--precision int4]

It reads the kept results, and plays each arm of the precision at one interval of float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from precision_accuracy import FRACTION, NUM_SHARDS, PRECISIONS, SHARES
from precision_seeds import RESULTS

from cpr_ext import MostFrequentlyUsed, Precision
from cpr_ext.lab.dlrm.failures import PlannedFailure
from cpr_ext.lab.dlrm.presets import find_preset
from cpr_ext.lab.dlrm.trainer import Trainer, TrainOptions
from cpr_ext.lab.emulation.run_strategy import Training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="as for cpr emulate")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, default="int4")
    parser.add_argument("--share", type=float, choices=SHARES, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(options.data)
    file = RESULTS / f"precision_accuracy_{options.data.partition(':')[0]}.json"
    differ = 0
    for run in json.loads(file.read_text())["runs"][: options.seeds]:
        for arm in run["arms"]:
            if arm["precision"] == options.precision and arm["share"] == options.share:
                auc = play(training, run, arm)
                differ += auc != arm["auc"]
                print(f"seed {run['seed']} every {arm['every_steps']}: {arm['auc']}, here {auc}")
    sys.exit(f"{differ} differ" if differ else 0)


def play(training: Training, run: dict[str, Any], arm: dict[str, Any]) -> float:
    """Return the AUC of an arm that saved into a store and recovered from it."""
    source = training.open(run["seed"])
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(
            **training.options(source),
            store=Path(folder) / "store",
            priority=MostFrequentlyUsed(FRACTION),
            every_steps=arm["every_steps"],
            failures=(PlannedFailure(run["failure_step"], tuple(run["shards"])),),
            num_shards=NUM_SHARDS,
            seed=run["seed"],
            rebase_after=None,
            precision=Precision(partial=arm["precision"]),
        )
        return Trainer(find_preset(training.model), source, options).run().auc


if __name__ == "__main__":
    main()
