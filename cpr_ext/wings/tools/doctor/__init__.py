"""Whether this machine and its packages fit: what was found, and the remedy for what is wrong.

Its modules import nothing that may be missing or broken until they examine it.
"""

from cpr_ext.wings.tools.doctor.check import Check, Diagnosis
from cpr_ext.wings.tools.doctor.diagnose import diagnose

__all__ = ["Check", "Diagnosis", "diagnose"]
