"""``python -m cpr_ext.wings.cli`` is ``cpr``."""

from cpr_ext.wings.cli import main

main()
