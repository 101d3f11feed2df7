"""Which rows training has changed since they were last saved."""
