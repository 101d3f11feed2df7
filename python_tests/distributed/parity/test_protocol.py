"""Single rules of the protocol, by example; the exploration runs them all together."""

import json
from dataclasses import replace

import pytest

from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.placement import place
from cpr_ext.distributed.parity.protocol import Log, ProtocolError, Report, soundness

GROUPS = place(4, 4, range(4))


def at(state, **held):
    """A report of a worker at ``state``; holders are at the same one unless ``held`` says."""
    logs = {int(name[1:]): Log(newest, newest - 1) for name, newest in held.items()}
    return Report(Log(state, state - 2), logs)


def test_deltas_are_applied_once_in_order_and_taken_back_from_the_newest_on():
    append, undo_order, undone = protocol.append, protocol.undo_order, protocol.undone
    assert append(append(protocol.begin(3), 4), 5) == Log(5, 3)
    log = append(Log(5, 3), 6)
    assert log == Log(6, 4)  # two are kept
    assert (undo_order(log, 4), undo_order(log, 6)) == ([6, 5], [])
    assert undone(undone(log, 6), 5) == Log(4, 4)
    several = append(append(append(protocol.begin(1, 3), 4), 7), 10)
    assert (several, several.next) == (Log(10, 4, 3), 13)
    assert (undo_order(several, 4), undone(several, 10)) == ([10, 7], Log(7, 4, 3))
    for call, wrong, step, says in (
        *((append, Log(5, 3), step, f"{step} came after that of step 5") for step in (5, 4, 7)),
        (append, several, 11, "11 came after"), (undo_order, several, 8, "no way back to state 8"),
        (undo_order, log, 3, "no way"), (undo_order, log, 7, "no way"),
        (undone, log, 5, "step 5 cannot"), (undone, Log(4, 4), 4, "step 4 cannot"),
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match=says):
            call(wrong, step)
    # Rows may change when all completed steps are acknowledged.
    assert (protocol.may_change(log, 6), protocol.may_change(log, 5)) == (True, False)


LOST, LIVE = Report(None), at(6, a0=6, a1=6)
SPOILED = Report(Log(6, 4), {}, "a table was replaced")


@pytest.mark.parametrize(
    ("reports", "groups", "state", "obstacle"),
    [
        # The oldest state of any holder; without a loss, what every worker completed.
        ([at(6, a1=6, a2=5, a3=6), LOST, LIVE, at(6, a0=5, a1=5)], GROUPS, 5, ""),
        ([at(6), at(7), at(6), at(7)], GROUPS, 6, ""),
        ([LOST, LIVE, LOST, LIVE], GROUPS, None, "workers [0, 2] of one parity group were lost"),
        ([LOST, LIVE, LOST, LIVE], ((0, 1), (2, 3)), 6, ""),
        ([LOST] * 4, ((0, 1), (2, 3)), None, "no worker kept its rows"),
        ([LIVE, LOST, Report(Log(6, 6)), LIVE], GROUPS, None, "parity on worker 2 was not comp"),
        ([at(6, a1=6), SPOILED, at(6), at(6)], GROUPS, None, "worker 1: a table was replaced"),
        ([at(9, a1=6), LOST, *[at(9, a1=9)] * 2], GROUPS, None, "not every worker can return to"),
    ],
)
def test_all_return_to_a_state_or_say_why_not(reports, groups, state, obstacle):
    verdict = protocol.agree_on_state(reports, groups)
    assert (verdict.state, bool(verdict.obstacle)) == (state, bool(obstacle))
    assert obstacle in verdict.obstacle


def test_a_group_that_parity_does_not_suffice_for_keeps_no_other_from_its_own():
    """Nor one without a loss."""
    reports = [Report(Log(8, 8), {}, "row 5 was written"), Report(Log(8, 6), {3: Log(8, 6)})]
    reports, groups = [*reports, Report(Log(8, 6), {}), LOST], ((0, 2), (1, 3))
    assert protocol.agree_on_state(reports, groups).obstacle == "worker 0: row 5 was written"
    assert protocol.agree_on_rows(reports, groups).state == 8
    spoiled = replace(reports[1], obstacle="row 6 was written")
    assert protocol.agree_on_rows([reports[0], spoiled, *reports[2:]], groups).state is None
    groups = ((0, 1), (2, 3), (4, 5))
    reports = [LOST, LOST, LOST, Report(Log(6, 4), {2: Log(5, 5)}), Report(Log(7, 5), {}), at(7)]
    verdict = protocol.agree_on_rows(reports, groups)
    assert (verdict.state, verdict.groups) == (5, ((2, 3),))
    assert verdict.obstacle == "workers [0, 1] of one parity group were lost together"
    assert protocol.agree_on_state(reports, groups).state is None


def test_parity_is_encoded_again_once_all_have_accepted_what_changed():
    sound, accepted = (soundness("", wants_encoding=wants) for wants in (False, True))
    unsound = soundness("row 5 was written", wants_encoding=True)
    members = ([sound, sound], [sound, accepted], [accepted, unsound])
    assert [*map(protocol.encodes_again, members)] == [False, True, False]


def test_a_report_crosses_as_json():
    for report in (LOST, at(6, a1=5, a3=6), Report(Log(2, 0, 2), {}, "why")):
        assert Report.from_plain(json.loads(json.dumps(report.to_plain()))) == report
