"""Snapshots, from the choice of rows to the commit."""
