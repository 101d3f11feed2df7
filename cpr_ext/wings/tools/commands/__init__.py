"""Commands of the tools."""

from __future__ import annotations

from cpr_ext.wings.tools.commands.doctor import doctor
from cpr_ext.wings.tools.commands.export import export
from cpr_ext.wings.tools.commands.fetch import fetch
from cpr_ext.wings.tools.commands.import_checkpoint import import_checkpoint
from cpr_ext.wings.tools.commands.inspect import inspect
from cpr_ext.wings.tools.commands.launch import launch
from cpr_ext.wings.tools.commands.plan import plan
from cpr_ext.wings.tools.commands.prove import prove
from cpr_ext.wings.tools.commands.publish import publish
from cpr_ext.wings.tools.commands.repair import repair
from cpr_ext.wings.tools.commands.verify import verify

COMMANDS = (
    *(prove, launch, plan, inspect, verify, repair, fetch, export),
    *(import_checkpoint, publish, doctor),
)
