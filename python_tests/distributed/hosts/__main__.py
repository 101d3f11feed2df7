"""Random faults by the hour: ``python -m python_tests.distributed.hosts SECONDS [SEED]``."""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from python_tests.distributed.hosts.agent_trial import AgentTrial
from python_tests.distributed.hosts.trial import Finals, Trial, ViolationError
from python_tests.distributed.namespaces import hosts

FAULTS_EACH = 5
JOBS_EACH = 6  # on one network
AGENTS_EACH = 4  # of so many jobs one is started by torchrun


def main(seconds, seed):
    began, counts, modes, found = time.monotonic(), Counter(), Counter(), []
    starts = Counter()
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="cpr-hosts-") as folder:
        number = 0
        while time.monotonic() < began + seconds:
            size = 3 + (seed + number // JOBS_EACH) % 3  # the last one hosts the rendezvous
            with hosts(size + 1) as around:
                finals = Finals(around, Path(folder) / f"{size}-{number}")
                for _ in range(JOBS_EACH):
                    if time.monotonic() >= began + seconds:
                        break
                    number += 1
                    kind = AgentTrial if number % AGENTS_EACH == 0 else Trial
                    trial = kind(around, Path(folder) / str(number), seed + number)
                    try:
                        trial.run(num_faults=FAULTS_EACH)
                        wrong = trial.wrong(finals.of(trial))
                    except ViolationError as error:
                        wrong = [f"after {trial.happened}: {error}"]
                    counts.update(trial.counts)
                    modes[trial.mode] += 1
                    starts["torchrun" if kind is AgentTrial else trial.loop] += 1
                    longest = max([longest, *trial.seconds])
                    what = ", ".join(trial.counts)
                    print(
                        f"{number}: {trial.world_size} workers, {trial.mode}, {trial.key()[1]}, "
                        f"hands: {bool(trial.hands)}, {kind.__name__} {trial.loop}: {what}: "
                        f"{wrong or 'right'}",
                        flush=True,
                    )
                    found += [f"seed {seed + number}: {each}" for each in wrong]
                    if not wrong:
                        trial.forget()
    for name, count in counts.most_common():
        print(f"{count:5d}  {name}")
    print(
        f"{sum(counts.values())} faults in {number} jobs ({dict(modes)}; {dict(starts)}), "
        f"{len(found)} violations; the longest pause was {longest:.1f} s"
    )
    for each in found:
        print(each[:3000])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
