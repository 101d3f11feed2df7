"""Commands of the tools."""

from __future__ import annotations

from cpr_ext.tools.commands.backup import backup, fetch
from cpr_ext.tools.commands.bench import bench
from cpr_ext.tools.commands.compact import compact
from cpr_ext.tools.commands.doctor import doctor
from cpr_ext.tools.commands.export import export
from cpr_ext.tools.commands.import_checkpoint import import_checkpoint
from cpr_ext.tools.commands.inspect import inspect
from cpr_ext.tools.commands.launch import launch
from cpr_ext.tools.commands.plan import plan
from cpr_ext.tools.commands.prove import prove
from cpr_ext.tools.commands.publish import publish
from cpr_ext.tools.commands.repair import repair
from cpr_ext.tools.commands.verify import verify
from cpr_ext.tools.commands.watch import watch

COMMANDS = (
    *(prove, launch, plan, inspect, watch, verify, repair, backup, fetch, export),
    *(import_checkpoint, publish, compact, bench, doctor),
)
