"""``python -m cpr_ext`` is ``cpr``."""

from cpr_ext.cli import main

main()
