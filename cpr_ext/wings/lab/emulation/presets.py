"""The policy's scenarios, as they are played here."""

from __future__ import annotations

from cpr_ext.wings.lab.emulation.scenario import Scenario
from cpr_ext.wings.policy.presets import PRESETS, find_preset

PRESET_NAMES = tuple(PRESETS)

# The production run that the paper's poster tells had this many failures; the other presets draw.
_NUM_FAILURES = {"production-50h": 5}


def find_scenario(name: str) -> Scenario:
    """Return a preset as a scenario.

    Raises:
        UsageError: there is none of that name.
    """
    preset = find_preset(name)
    return Scenario(
        name=preset.name,
        job=preset.job,
        failure_model=preset.failures,
        costs=preset.costs,
        pls_target=preset.target_pls,
        num_failures=_NUM_FAILURES.get(name),
        num_trainers=preset.num_trainers,
    )
