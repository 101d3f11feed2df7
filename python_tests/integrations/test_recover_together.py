"""Under plain torchrun, ranks never go on from different steps, whoever died in a commit."""

import json
import os
import random
import signal

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from python_tests.integrations.together_job import STEPS

JOB = "python_tests.integrations.together_job"


@pytest.fixture(scope="module")
def nursery(torchrec_nursery):
    torchrec_nursery.ask("wait", torchrec_nursery.ask("call", JOB, "imported"), 60)
    return torchrec_nursery


class Restarts:
    """A job whose ranks are all started again when one is dead, as torchrun does it."""

    def __init__(self, nursery, directory, *, world_size=2, function="run"):
        self.nursery, self.directory, self.life = nursery, directory, 0
        self.world_size, self.function = world_size, function

    def live(self, *arguments_by_rank):
        """One life of all ranks; returns how each ended."""
        self.life += 1
        pids = [
            self.nursery.ask(
                "call", JOB, self.function, str(self.directory), rank, self.world_size, self.life,
                *arguments,
            )
            for rank, arguments in enumerate(arguments_by_rank)
        ]  # fmt: skip
        codes = {}
        while len(codes) < len(pids):
            for rank, pid in enumerate(pids):
                if rank not in codes and (code := self.nursery.ask("wait", pid, 0.05)) is not None:
                    codes[rank] = code
            if any(code != 0 for code in codes.values()):
                for rank in range(self.world_size):
                    if rank not in codes and self.nursery.ask("wait", pids[rank], 3.0) is None:
                        os.kill(pids[rank], signal.SIGKILL)
        return [codes[rank] for rank in range(self.world_size)]

    def told(self):
        return [
            json.loads((self.directory / f"{rank}-{self.life}.json").read_text())
            for rank in range(self.world_size)
        ]

    def ends(self):
        """What each rank of the last life held after its last step, in every bit."""
        return [
            json.loads((self.directory / f"end-{rank}-{self.life}.json").read_text())
            for rank in range(self.world_size)
        ]

    def logs(self):
        return "\n".join(path.read_text()[-2000:] for path in self.directory.glob("log-*"))


def kill_in_commits(job, deaths, mode="partial"):
    """Lives in each of which one rank dies at a rename; then one more, to see where all are."""
    told = []
    for victim, rename in [*deaths, (None, None)]:
        ends = job.live(*((rename if rank == victim else None, mode) for rank in range(2)))
        if victim is None:
            assert ends == [0, 0], job.logs()
        else:
            assert ends[victim] == -signal.SIGKILL, f"{victim}, {rename}: {ends}\n{job.logs()}"
        told.append(job.told())
    for first, second in told:
        assert (first["step"], first["samples"]) == (second["step"], second["samples"])
        assert first["facts"] == second["facts"]
    return [first["step"] for first, _ in told]


def test_a_rank_killed_in_a_commit_leaves_no_two_ranks_at_different_steps(nursery, tmp_path):
    steps = kill_in_commits(Restarts(nursery, tmp_path), [(1, 3), (0, 4)])
    assert steps == sorted(steps)
    assert steps[-1] > 0


def test_full_recovery_ends_bit_for_bit_as_a_job_that_nobody_killed(nursery, tmp_path):
    folders = [tmp_path / name for name in ("killed", "untouched")]
    for folder in folders:
        folder.mkdir()
    killed, untouched = (Restarts(nursery, folder) for folder in folders)
    steps = kill_in_commits(killed, [(1, 3), (0, 4)], mode="full")
    assert steps == sorted(steps)
    assert steps[1] > 0  # all goes back to what the first life began with
    whole = (None, "full", steps[-1] + STEPS)
    assert untouched.live(whole, whole) == [0, 0], untouched.logs()
    assert killed.ends() == untouched.ends()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_five_deaths_in_commits_leave_no_two_ranks_at_different_steps(nursery, tmp_path):
    chance = random.Random()
    deaths = [(chance.randrange(2), chance.randrange(4)) for _ in range(25)]
    print(deaths)
    steps = kill_in_commits(Restarts(nursery, tmp_path), deaths)
    assert steps == sorted(steps)


def test_samples_that_a_rank_lacks_are_told(nursery, tmp_path):
    """An ordinary Checkpointer; the ranks' newest snapshots are three steps apart."""
    job = Restarts(nursery, tmp_path, function="run_plain")
    assert job.live((2, False), (2, False)) == [0, 0]
    assert job.live((1, False), (4, False)) == [0, 0]
    assert [told[:2] for told in job.told()] == [[2, 0], [2, 0]]
    assert job.live((0, False), (0, False)) == [0, 0]
    assert [told[:2] for told in job.told()] == [[6, 3], [6, 0]]
    assert job.told()[0][3] is None  # rows that changed in the three steps are older now


def test_extra_state_is_what_the_furthest_rank_saved(nursery, tmp_path):
    """Not what that rank's function returns after its restart."""
    job = Restarts(nursery, tmp_path, function="run_plain")
    assert job.live((2, False), (5, False)) == [0, 0]
    assert job.live((0, False), (0, False)) == [0, 0]
    assert [told[2] for told in job.told()] == [{"epoch": {"epoch": 5, "rank": 1}}] * 2


def test_a_replicated_table_is_refused_on_every_rank(nursery, tmp_path):
    job = Restarts(nursery, tmp_path, function="run_plain")
    assert job.live((1, True), (1, True)) == [1, 1]


def test_each_rank_gets_the_state_back_that_it_says_is_its_own(nursery, tmp_path):
    job = Restarts(nursery, tmp_path, function="run_readers")
    assert job.live((3, True), (3, True)) == [0, 0], job.logs()
    first = job.told()
    assert job.live((0, True), (0, True)) == [0, 0], job.logs()
    for rank, said in enumerate(job.told()):
        assert said["step"] == 3
        assert said["reader"] == {"rank": rank, "offset": 3 * (100 + rank)}
        assert said["file"] == f"part-{rank}.parquet"
        assert (said["differences"], said["warnings"]) == ([], [])
    assert first[0]["draw"] != first[1]["draw"]
    assert job.told()[0]["draw"] != job.told()[1]["draw"]


def test_own_state_of_another_step_than_the_jobs_is_named(nursery, tmp_path):
    job = Restarts(nursery, tmp_path, function="run_readers")
    assert job.live((3, True), (5, True)) == [0, 0], job.logs()
    assert job.live((0, True), (0, True)) == [0, 0], job.logs()
    behind, ahead = job.told()
    assert (behind["step"], ahead["step"]) == (5, 5)
    assert behind["reader"] == {"rank": 0, "offset": 300}
    assert behind["differences"] == ["PerRank state is of step 3, the job resumes at 5"]
    assert "PerRank state of this process is of step 3" in behind["warnings"][0]
    assert (ahead["differences"], ahead["warnings"]) == ([], [])
    assert ahead["reader"] == {"rank": 1, "offset": 505}


def test_without_a_word_all_ranks_get_the_state_of_one(nursery, tmp_path):
    job = Restarts(nursery, tmp_path, function="run_readers")
    assert job.live((3, False), (3, False)) == [0, 0], job.logs()
    assert (
        "state['reader'], state['draws'], state['file'] of" in job.told()[1]["warnings"][0]
    )  # at the start
    assert job.live((0, False), (0, False)) == [0, 0], job.logs()
    leader, other = job.told()
    assert [said["reader"]["rank"] for said in (leader, other)] == [0, 0]
    assert (leader["warnings"], leader["differences"]) == ([], [])
    (text,) = other["warnings"]
    assert "state['file'] of this process was not the same as that of rank 0" in text
    assert other["differences"] == [text]
