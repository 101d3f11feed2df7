"""What one does with a store outside training: look, check, export, compact, read single rows."""

from cpr_ext.maintenance.compaction import CompactReport, compact
from cpr_ext.maintenance.exporting import ExportReport, export
from cpr_ext.maintenance.inspection import StoreSummary, TableDetails, inspect, inspect_table
from cpr_ext.maintenance.repair import RepairReport, repair
from cpr_ext.maintenance.row_reading import read_rows
from cpr_ext.maintenance.self_check import SelfCheck, self_check
from cpr_ext.maintenance.verification import Damage, VerifyReport, verify
from cpr_ext.merging import MergeLimits

__all__ = [
    "CompactReport",
    "Damage",
    "ExportReport",
    "MergeLimits",
    "RepairReport",
    "SelfCheck",
    "StoreSummary",
    "TableDetails",
    "VerifyReport",
    "compact",
    "export",
    "inspect",
    "inspect_table",
    "read_rows",
    "repair",
    "self_check",
    "verify",
]
