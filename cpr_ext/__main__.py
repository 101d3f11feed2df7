"""``python -m cpr_ext`` is ``cpr``."""

from cpr_ext.wings.cli import main

main()
