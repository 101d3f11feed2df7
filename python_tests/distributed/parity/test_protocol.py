"""Single rules of the protocol, by example; the exploration runs them all together."""

import json
from dataclasses import replace

import pytest

from cpr_ext.distributed.parity.placement import place
from cpr_ext.distributed.parity.protocol import (
    Log,
    ProtocolError,
    Report,
    agree_on_rows,
    agree_on_state,
    append,
    begin,
    encodes_again,
    may_change,
    soundness,
    undo_order,
    undone,
)

GROUPS = place(4, 4, range(4))


def at(state, **held):
    """A report of a worker at ``state``; holders are at the same one unless ``held`` says."""
    logs = {int(name[1:]): Log(newest, newest - 1) for name, newest in held.items()}
    return Report(Log(state, state - 2), logs)


def test_deltas_are_applied_once_and_in_order():
    log = append(append(begin(3), 4), 5)
    assert log == Log(5, 3)
    for step in (5, 4, 7):
        with pytest.raises(ProtocolError, match=f"step {step} came after that of step 5"):
            append(log, step)
    assert append(log, 6) == Log(6, 4)  # two are kept


def test_deltas_are_taken_back_from_the_newest_on():
    log = Log(6, 4)
    assert undo_order(log, 4) == [6, 5]
    assert undo_order(log, 6) == []
    assert undone(undone(log, 6), 5) == Log(4, 4)
    for state in (3, 7):
        with pytest.raises(ProtocolError):
            undo_order(log, state)
    with pytest.raises(ProtocolError):
        undone(log, 5)
    with pytest.raises(ProtocolError):
        undone(Log(4, 4), 4)


def test_deltas_of_several_steps_follow_each_other_by_their_stride():
    log = append(append(append(begin(1, 3), 4), 7), 10)
    assert (log, log.next) == (Log(10, 4, 3), 13)
    assert undo_order(log, 4) == [10, 7]
    assert undone(log, 10) == Log(7, 4, 3)
    with pytest.raises(ProtocolError):
        append(log, 11)
    with pytest.raises(ProtocolError, match="no way back to state 8"):
        undo_order(log, 8)
    assert may_change(log, 10)


def test_rows_may_change_when_all_completed_steps_are_acknowledged():
    assert may_change(Log(5, 3), 5)
    assert not may_change(Log(5, 3), 4)


def test_all_return_to_the_oldest_state_of_any_holder():
    reports = [at(6, a1=6, a2=5, a3=6), Report(None), at(6, a0=6, a1=6, a3=6), at(6, a0=5, a1=5)]
    assert agree_on_state(reports, GROUPS).state == 5


def test_parity_does_not_suffice_for_two_of_a_group_but_for_one_of_each():
    live = [at(6, a0=6, a1=6)] * 4
    lost = Report(None)
    together = agree_on_state([lost, live[1], lost, live[3]], GROUPS)
    assert (together.state, together.obstacle) == (
        None, "workers [0, 2] of one parity group were lost together",
    )  # fmt: skip
    mirrors = ((0, 1), (2, 3))
    assert agree_on_state([lost, live[1], lost, live[3]], mirrors).state == 6
    assert agree_on_state([lost] * 4, mirrors).obstacle == "no worker kept its rows"


def test_parity_that_is_not_encoded_or_not_sound_does_not_suffice():
    reports = [at(6, a1=6), Report(None), Report(Log(6, 6)), at(6, a1=6)]
    assert "the parity on worker 2 was not complete" in agree_on_state(reports, GROUPS).obstacle
    spoiled = [at(6, a1=6), Report(Log(6, 4), {}, "a table was replaced"), at(6), at(6)]
    assert agree_on_state(spoiled, GROUPS).obstacle == "worker 1: a table was replaced"


def test_a_group_without_a_loss_keeps_no_other_from_its_parity():
    known = {3: Log(8, 6)}
    reports = [Report(Log(8, 8), {}, "row 5 was written"), Report(Log(8, 6), known)]
    reports += [Report(Log(8, 6), {}), Report(None)]
    groups = ((0, 2), (1, 3))
    assert agree_on_state(reports, groups).obstacle == "worker 0: row 5 was written"
    assert agree_on_rows(reports, groups).state == 8
    spoiled = replace(reports[1], obstacle="row 6 was written")
    assert agree_on_rows([reports[0], spoiled, *reports[2:]], groups).state is None


def test_a_group_that_parity_does_not_suffice_for_keeps_no_other_from_its_own():
    lost, groups = Report(None), ((0, 1), (2, 3), (4, 5))
    reports = [lost, lost, lost, Report(Log(6, 4), {2: Log(5, 5)}), Report(Log(7, 5), {}), at(7)]
    verdict = agree_on_rows(reports, groups)
    assert (verdict.state, verdict.groups) == (5, ((2, 3),))
    assert verdict.obstacle == "workers [0, 1] of one parity group were lost together"
    assert agree_on_state(reports, groups).state is None


def test_parity_is_encoded_again_once_all_have_accepted_what_changed():
    sound, accepted = soundness("", wants_encoding=False), soundness("", wants_encoding=True)
    unsound = soundness("row 5 was written", wants_encoding=True)
    assert not encodes_again([sound, sound])
    assert encodes_again([sound, accepted])
    assert not encodes_again([accepted, unsound])


def test_a_way_back_that_is_too_far_falls_back():
    reports = [at(9, a1=6), Report(None), at(9, a1=9), at(9, a1=9)]
    assert agree_on_state(reports, GROUPS).obstacle == "not every worker can return to step 6"


def test_without_a_loss_all_return_to_what_every_worker_completed():
    assert agree_on_state([at(6), at(7), at(6), at(7)], GROUPS).state == 6


def test_a_report_crosses_as_json():
    for report in (Report(None), at(6, a1=5, a3=6), Report(Log(2, 0, 2), {}, "why")):
        assert Report.from_plain(json.loads(json.dumps(report.to_plain()))) == report
