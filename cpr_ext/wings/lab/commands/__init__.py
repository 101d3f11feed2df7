"""Commands of the lab."""

from __future__ import annotations

from cpr_ext.wings.lab.commands.emulate import emulate
from cpr_ext.wings.lab.commands.train import train

COMMANDS = (train, emulate)
