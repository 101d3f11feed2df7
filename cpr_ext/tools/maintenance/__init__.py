"""What one does with a store outside training: look, check, export, compact, read single rows.

The same with those of all workers of a job: ``inspect_job``, ``verify_job``, ``compact_job``,
``repair_job``; ``export`` takes either.
"""

from cpr_ext.storage.merge import MergeLimits
from cpr_ext.tools.maintenance.backup import CopyReport, backup, fetch
from cpr_ext.tools.maintenance.compaction import CompactReport, compact
from cpr_ext.tools.maintenance.exporting import ExportedStore, ExportReport, export
from cpr_ext.tools.maintenance.importing import ImportReport, import_checkpoint
from cpr_ext.tools.maintenance.inspection import StoreSummary, TableDetails, inspect, inspect_table
from cpr_ext.tools.maintenance.job_changes import JobReport, compact_job, repair_job
from cpr_ext.tools.maintenance.job_inspection import (
    JobSummary,
    JobTable,
    JobVerifyReport,
    WorkerSummary,
    inspect_job,
    verify_job,
)
from cpr_ext.tools.maintenance.repair import RepairReport, repair
from cpr_ext.tools.maintenance.row_reading import read_rows
from cpr_ext.tools.maintenance.self_check import SelfCheck, self_check
from cpr_ext.tools.maintenance.verification import Damage, VerifyReport, verify
from cpr_ext.tools.maintenance.watching import SnapshotStanding, watch

__all__ = [
    "CompactReport",
    "CopyReport",
    "Damage",
    "ExportReport",
    "ExportedStore",
    "ImportReport",
    "JobReport",
    "JobSummary",
    "JobTable",
    "JobVerifyReport",
    "MergeLimits",
    "RepairReport",
    "SelfCheck",
    "SnapshotStanding",
    "StoreSummary",
    "TableDetails",
    "VerifyReport",
    "WorkerSummary",
    "backup",
    "compact",
    "compact_job",
    "export",
    "fetch",
    "import_checkpoint",
    "inspect",
    "inspect_job",
    "inspect_table",
    "read_rows",
    "repair",
    "repair_job",
    "self_check",
    "verify",
    "verify_job",
    "watch",
]
