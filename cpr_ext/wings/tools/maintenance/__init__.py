"""What one does with a store outside training: look, check, export, read single rows.

The same with those of all workers of a job: ``inspect_job``, ``verify_job``; ``export`` takes
either.
"""

from cpr_ext.wings.tools.maintenance.exporting import ExportedStore, ExportReport, export
from cpr_ext.wings.tools.maintenance.fetching import FetchReport, fetch
from cpr_ext.wings.tools.maintenance.importing import ImportReport, import_checkpoint
from cpr_ext.wings.tools.maintenance.inspection import StoreSummary, inspect
from cpr_ext.wings.tools.maintenance.job_inspection import (
    JobSummary,
    JobVerifyReport,
    WorkerSummary,
    inspect_job,
    verify_job,
)
from cpr_ext.wings.tools.maintenance.repair import RepairReport, repair
from cpr_ext.wings.tools.maintenance.row_reading import read_rows
from cpr_ext.wings.tools.maintenance.verification import Damage, VerifyReport, verify

__all__ = [
    "Damage",
    "ExportReport",
    "ExportedStore",
    "FetchReport",
    "ImportReport",
    "JobSummary",
    "JobVerifyReport",
    "RepairReport",
    "StoreSummary",
    "VerifyReport",
    "WorkerSummary",
    "export",
    "fetch",
    "import_checkpoint",
    "inspect",
    "inspect_job",
    "read_rows",
    "repair",
    "verify",
    "verify_job",
]
