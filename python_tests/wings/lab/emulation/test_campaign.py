import json
import multiprocessing

import pytest

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.emulation.campaign import RunKey, load_campaign, locked, open_campaign

CONFIG = {"scenario": {"pls_target": 0.1, "job": {"total_hours": 56}}, "training": {"data": "a"}}
RUN = {"strategy": "full", "seed": 1, "auc": 0.8}


def begun(directory):
    campaign = open_campaign(directory, CONFIG)
    campaign.save()
    campaign.add(RunKey(1, "full"), RUN)


def test_finished_runs_are_found_again(tmp_path):
    begun(tmp_path / "a")
    campaign = open_campaign(tmp_path / "a", CONFIG)
    assert campaign.runs == {RunKey(1, "full"): RUN}
    missing = campaign.missing(["no-failure", "full"], range(2))
    assert [key.name for key in missing] == [
        "no-failure-seed000",
        "full-seed000",
        "no-failure-seed001",
    ]


def test_what_is_not_of_this_campaign_is_refused_and_the_difference_named(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        open_campaign(tmp_path, CONFIG)
    with pytest.raises(UsageError, match=r"holds no campaign\.json"):
        load_campaign(tmp_path)
    begun(tmp_path / "a")
    other = {**CONFIG, "scenario": {"pls_target": 0.2, "job": {"total_hours": 56}}}
    with pytest.raises(UsageError, match=r"scenario\.pls_target was 0\.1, now 0\.2"):
        open_campaign(tmp_path / "a", other)
    for text in ("", "{", "[1]", '{"strategy": "mine", "seed": 1}'):
        (tmp_path / "a" / "runs" / "full-seed001.json").write_text(text)
        with pytest.raises(DataError, match=r"full-seed001\.json"):
            load_campaign(tmp_path / "a")
    (tmp_path / "a" / "campaign.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="format is 99"):
        load_campaign(tmp_path / "a")


def _hold(directory, ready, done):
    with locked(directory):
        ready.set()
        done.wait(30)


def test_two_processes_do_not_share_a_directory(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, done))
    holder.start()
    try:
        assert ready.wait(30)
        with pytest.raises(UsageError, match="another process"), locked(tmp_path):
            pass
    finally:
        done.set()
        holder.join(30)
    left_over = tmp_path / "work" / "full-seed000-123"
    left_over.mkdir(parents=True)
    with locked(tmp_path):
        assert not left_over.exists()
