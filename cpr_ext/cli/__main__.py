"""``python -m cpr_ext.cli`` is ``cpr``."""

from cpr_ext.cli import main

main()
