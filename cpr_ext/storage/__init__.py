"""The files of a store: written, read and removed."""
