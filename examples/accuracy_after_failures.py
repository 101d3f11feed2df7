"""What losing half of the shards near the end costs in accuracy, over several seeds.

python examples/accuracy_after_failures.py --data movietweetings:DIR --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

NUM_SHARDS = 8
LOST = "+".join(str(shard) for shard in range(0, NUM_SHARDS, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="synthetic", help="as for cpr train")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at", type=float, default=0.95, help="share of the run done by then")
    options = parser.parse_args()
    auc: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        whole = train(options.data, seed)
        failure = ["--fail-at", f"{int(options.at * whole['steps'])}:{LOST}"]
        runs = {
            "no failure": whole,
            "partial recovery, MFU": train(options.data, seed, *failure, "--recovery", "partial"),
            "full recovery": train(
                options.data, seed, *failure, "--recovery", "full", "--priority", "all"
            ),
            "no recovery": train(options.data, seed, *failure, "--recovery", "none"),
        }
        for label, run in runs.items():
            auc.setdefault(label, []).append(run["auc"])
    reference = statistics.mean(auc["no failure"])
    print(f"shards {LOST} of {NUM_SHARDS} lost at {options.at:.0%} of {options.data}; test AUC")
    for label, values in auc.items():
        mean = statistics.mean(values)
        seeds = " ".join(f"{value:.4f}" for value in values)
        print(f"{label:<24} mean {mean:.4f}  ({mean - reference:+.4f})  seeds: {seeds}")


def train(data: str, seed: int, *options: str) -> dict:
    command = [sys.executable, "-m", "cpr_ext.cli", "train", "--quiet", "--data", data]
    command += ["--seed", str(seed), "--shards", str(NUM_SHARDS), "--json"]
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
