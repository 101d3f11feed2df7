"""The files of a store: written, read, merged and removed."""
