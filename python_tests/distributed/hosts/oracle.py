"""What must be true of a job that has ended, whatever happened to it."""

from python_tests.distributed.hosts.fate_job import BATCH
from python_tests.helpers import differences

# Why exact recovery may fall back to stores, or to the lost rows alone; each is reported.
EXCUSES = (
    "of one parity group were lost together", "was not complete", "outside their optimizer",
    "no worker kept its rows", "cannot be rebuilt", "not every worker can return",
)  # fmt: skip


def violations(trial, right):
    """Say what is wrong, one line each."""
    return [*_of_recoveries(trial), *_of_fates(trial), *_of_bits(trial, right), *_of_hands(trial)]


def rounds(trial):
    """Recoveries by epoch, each as all workers that saw it say."""
    found = {}
    for rank in range(trial.world_size):
        for event in trial.cluster.recovered(rank):
            found.setdefault(event["epoch"], []).append(event["recovery"])
    return dict(sorted(found.items()))


def is_exact(trial):
    """Whether all recoveries gave everything back; the first is the start."""
    later = [said[0] for said in list(rounds(trial).values())[1:]]
    return all(not any(r["samples_lost"]) and r["recovery"] != "partial" for r in later)


def _of_recoveries(trial):
    facts = ("recovery", "step", "lost", "source", "samples_lost", "obstacle")
    for epoch, said in rounds(trial).items():
        if len({str([each[name] for name in facts]) for each in said}) > 1:
            yield f"round {epoch}: workers report it differently: {said}"
    for said in list(rounds(trial).values())[1:]:
        recovery = said[0]
        if recovery["recovery"] != "partial" or trial.mode.startswith("partial"):
            continue
        has_excuse = any(excuse in recovery["obstacle"] for excuse in EXCUSES)
        if trial.mode.startswith("exact") and not has_excuse:
            yield f"a partial recovery without an excuse: {recovery}"
        if trial.mode == "full":
            yield f"a partial recovery of a job with full recovery: {recovery}"


def _of_fates(trial):
    """Each step at most once, and as many are missing as was reported."""
    later, finals = [said[0] for said in list(rounds(trial).values())[1:]], trial.finals()
    for rank in range(trial.world_size):
        fates = finals[rank]["model"]["fates.weight"].flatten()
        odd = [(step, n) for step, n in enumerate(fates.tolist()) if n not in (0.0, 1.0)]
        if odd:
            yield f"worker {rank}: steps had another number of times than 0 or 1: {odd}"
        missing = int((fates == 0).sum()) * BATCH * trial.world_size
        reported = sum(recovery["samples_lost"][rank] for recovery in later)
        all_lost = any(len(recovery["lost"]) == trial.world_size for recovery in later)
        if missing != reported and not (all_lost and missing <= reported):
            yield f"worker {rank}: {missing} samples are missing, {reported} were reported"


def _of_bits(trial, right):
    if trial.mode.startswith("partial") or not is_exact(trial):
        return
    for rank, final in enumerate(trial.finals()):
        for name in differences(right[rank], final):
            yield f"worker {rank}: other bits than without faults: {name}"


def _of_hands(trial):
    """Rows written by hand end the protection, and a line says so."""
    for rank in range(trial.world_size):
        events = trial.cluster.events(rank)
        for number, event in enumerate(events):
            if event["event"] != "hand" or not event["was_protected"]:
                continue
            later = [e for e in events[number:] if e["pid"] == event["pid"]]
            # The step was completed before anything else happened.
            if len(later) > 1 and later[1]["event"] == "step":
                said = f"not protected after step {event['step'] + 1}: table"
                if said not in trial.logs(rank):
                    yield f"nobody said that rows were written: {event}"
