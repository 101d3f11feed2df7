"""Under plain torchrun, ranks never go on from different steps, whoever died in a commit."""

import json
import os
import signal

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.integrations.together_job import STEPS, run, run_plain

MINE, ALL = True, False


class Restarts:
    """A job of two ranks, which are all started again when one is dead, as torchrun does it."""

    def __init__(self, ranks, directory, function):
        self.ranks, self.directory, self.life, self.function = ranks, directory, 0, function
        directory.mkdir(exist_ok=True)

    def live(self, *by_rank):
        """One life, of ranks with these arguments; returns how each ended."""
        self.life += 1
        pids = self.ranks.start(self.function, self.directory, 2, self.life, by_rank)
        codes, ask = {}, self.ranks.nursery.ask
        while len(codes) < len(pids):
            for pid in pids:
                if pid not in codes and (code := ask("wait", pid, 0.05)) is not None:
                    codes[pid] = code
            for pid in pids if any(codes.values()) else ():
                if pid not in codes and ask("wait", pid, 3.0) is None:
                    os.kill(pid, signal.SIGKILL)
        return [codes[pid] for pid in pids]

    def told(self, steps, *options):
        """What both ranks told first in a life that ended well."""
        assert self.live(*((each, *options) for each in steps)) == [0, 0], self.logs()
        return self.read("")

    def read(self, kind):
        files = [self.directory / f"{kind}{rank}-{self.life}.json" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files]

    def logs(self):
        return self.ranks.logs(self.directory)


def kill_in_commits(job, deaths, mode):
    """Lives in each of which one rank dies at a rename; then one more, to see where all are."""
    steps = []
    for victim, rename in [*deaths, (None, None)]:
        ends = job.live(*((rename if r == victim else None, mode, STEPS) for r in range(2)))
        expected = [0, 0] if victim is None else [*ends[:victim], -9, *ends[victim + 1 :]]
        assert ends == expected, f"{victim}, {rename}: {ends}\n{job.logs()}"
        first, second = job.read("")
        assert (first["step"], first["samples"]) == (second["step"], second["samples"])
        assert first["facts"] == second["facts"]
        steps.append(first["step"])
    assert steps == sorted(steps)
    return steps


def test_full_recovery_ends_bit_for_bit_as_a_job_that_nobody_killed(ranks, tmp_path):
    killed, untouched = (Restarts(ranks, tmp_path / name, run) for name in ("killed", "untouched"))
    steps = kill_in_commits(killed, [(1, 3), (0, 4)], "full")
    assert steps[1] > 0  # all goes back to what the first life began with
    whole = (None, "full", steps[-1] + STEPS)
    assert untouched.live(whole, whole) == [0, 0], untouched.logs()
    assert killed.read("end-") == untouched.read("end-")


def test_what_a_rank_lacks_is_told_and_a_value_is_that_of_the_furthest(ranks, tmp_path):
    """The ranks' newest snapshots are three steps apart."""
    job = Restarts(ranks, tmp_path, run_plain)
    job.told((2, 2), ALL, False)
    told = job.told((1, 4), ALL, False)
    assert [(t["step"], t["lost"]) for t in told] == [(2, 0), (2, 0)]
    told = job.told((0, 0), ALL, False)
    assert [(t["step"], t["lost"]) for t in told] == [(6, 3), (6, 0)]
    assert told[0]["stale"] is None  # rows that changed in the three steps are older now
    # Not what that rank's function returns after its restart.
    assert [t["file"] for t in told] == ["part-1-6"] * 2


def test_a_replicated_table_is_refused_on_every_rank(ranks, tmp_path):
    job = Restarts(ranks, tmp_path, run_plain)
    assert job.live((1, ALL, True), (1, ALL, True)) == [1, 1]


def test_each_rank_gets_the_state_back_that_it_says_is_its_own(ranks, tmp_path):
    """Of another step than the job's, if it was saved at another one; that is named."""
    job = Restarts(ranks, tmp_path, run_plain)
    first, second = job.told((3, 3), MINE, False), job.told((0, 2), MINE, False)
    for rank, said in enumerate(second):
        assert said["step"] == 3
        assert said["reader"] == {"rank": rank, "offset": 3 * (100 + rank)}
        assert said["file"] == f"part-{rank}-3"
        assert (said["differences"], said["warnings"]) == ([], [])
    for told in (first, second):
        assert told[0]["draw"] != told[1]["draw"]
    behind, ahead = job.told((0, 0), MINE, False)
    assert (behind["step"], ahead["step"]) == (5, 5)
    assert behind["reader"] == {"rank": 0, "offset": 300}
    assert behind["differences"] == ["PerRank state is of step 3, the job resumes at 5"]
    assert "['draws', 'file', 'reader'], is of step 3" in behind["warnings"][0]
    assert (ahead["differences"], ahead["warnings"]) == ([], [])
    assert ahead["reader"] == {"rank": 1, "offset": 505}


def test_without_a_word_all_ranks_get_the_state_of_one(ranks, tmp_path):
    job = Restarts(ranks, tmp_path, run_plain)
    started = job.told((3, 3), ALL, False)
    assert "state['reader'], state['draws'], state['file'] of" in started[1]["warnings"][0]
    leader, other = job.told((0, 0), ALL, False)
    assert [said["reader"]["rank"] for said in (leader, other)] == [0, 0]
    assert (leader["warnings"], leader["differences"]) == ([], [])
    (text,) = other["warnings"]
    assert "state['file'] of this process was not the same as that of rank 0" in text
    assert other["differences"] == [text]
