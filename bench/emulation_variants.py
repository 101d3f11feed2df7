"""Why a strategy loses what it loses: MFU and SSU with other fractions and sampling periods.

    python bench/emulation_variants.py [--data movietweetings:DIR] [--seeds 10]

Seeds without failures tell nothing and are left out. Results in bench/results/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cpr_ext.lab.dlrm.presets import find_preset
from cpr_ext.lab.dlrm.trainer import Trainer, TrainOptions
from cpr_ext.lab.emulation.machine import describe_machine
from cpr_ext.lab.emulation.presets import PRESET_NAMES, find_scenario
from cpr_ext.lab.emulation.run_strategy import Training, plan_failures
from cpr_ext.lab.emulation.scenario import Scenario
from cpr_ext.lab.emulation.statistics import estimate, estimate_ratio
from cpr_ext.saving.priorities import AllRows, MostFrequentlyUsed, Priority, SubSampledUsed

RESULTS = Path(__file__).resolve().parent / "results"


def variants(seed: int) -> dict[str, tuple[Priority, float]]:
    """Priority, and its saves per T_save, by name; all write the same bytes per hour."""
    return {
        "vanilla": (AllRows(), 1.0),
        "mfu r=1/8": (MostFrequentlyUsed(0.125), 0.125),
        "mfu r=1/4": (MostFrequentlyUsed(0.25), 0.25),
        "ssu r=1/8 period 2": (SubSampledUsed(0.125, period=2, seed=seed), 0.125),
        "ssu r=1/8 period 1": (SubSampledUsed(0.125, period=1, seed=seed), 0.125),
        "ssu r=1/8 period 8": (SubSampledUsed(0.125, period=8, seed=seed), 0.125),
        "ssu r=1/4 period 2": (SubSampledUsed(0.25, period=2, seed=seed), 0.25),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="as for cpr emulate")
    parser.add_argument("--preset", default="abstract-56h", choices=PRESET_NAMES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(options.data, epochs=options.epochs)
    losses: dict[str, dict[int, float]] = {}
    scenario = find_scenario(options.preset)
    seeds = [seed for seed in range(100) if scenario.draw_failures(seed)][: options.seeds]
    for seed in seeds:
        whole = auc(scenario, training, seed, None, 1.0)
        for name, (priority, share) in variants(seed).items():
            losses.setdefault(name, {})[seed] = whole - auc(
                scenario, training, seed, priority, share
            )
            print(f"seed {seed} {name}: AUC loss {losses[name][seed]:.5f}", flush=True)
    rows = []
    vanilla = list(losses["vanilla"].values())
    for name, by_seed in losses.items():
        values = list(by_seed.values())
        loss, share = estimate(values), estimate_ratio(values, vanilla)
        rows.append({"variant": name, "auc_loss": vars(loss), "of_vanilla": vars(share)})
        rows[-1]["auc_loss_by_seed"] = by_seed
        print(
            f"{name:<20} AUC loss {1e3 * loss.mean:.2f} [{1e3 * loss.low:.2f}, "
            f"{1e3 * loss.high:.2f}] e-3, of vanilla's {share.mean:.2f} "
            f"[{share.low:.2f}, {share.high:.2f}]"
        )
    epochs = f"_{options.epochs}_epochs" if options.epochs else ""
    job = "" if options.preset == "abstract-56h" else f"_{options.preset.partition('-')[0]}"
    data = options.data.partition(":")[0]
    file = RESULTS / f"emulation_variants{job}_{data}{epochs}.json"
    plain: dict[str, Any] = {
        "command": shlex.join(["python", "bench/emulation_variants.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "scenario": scenario.to_plain(),
        "rows": rows,
    }
    file.write_text(json.dumps(plain, indent=1) + "\n")
    print(f"kept in bench/results/{file.name}")


def auc(
    scenario: Scenario, training: Training, seed: int, priority: Priority | None, share: float
) -> float:
    """Test AUC of a run; ``priority`` None is the run without failure."""
    source = training.open(seed)
    clock = training.clock(source, scenario.job.total_hours)
    failures = plan_failures(scenario.draw_failures(seed), clock) if priority else ()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(
            **training.options(source),
            store=Path(folder) / "store" if priority else None,
            priority=priority,
            every_steps=clock.interval_steps(share * scenario.cpr_interval_hours),
            failures=failures,
            num_shards=scenario.job.num_shards,
            seed=seed,
            rebase_after=None,
        )
        return Trainer(find_preset(training.model), source, options).run().auc


if __name__ == "__main__":
    main()
