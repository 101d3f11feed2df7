"""The store that a command was given, which may be the address of a copy."""

from __future__ import annotations

import click

from cpr_ext.wings.cli.output import show_as


def open_store(store: str, *, headers_only: bool = False) -> str:
    """Return a directory with the store; while the command runs, if it is the address of a copy.

    What is printed names the address.
    """
    from cpr_ext.wings.remote import local_store

    place = local_store(store, headers_only=headers_only)
    directory = click.get_current_context().with_resource(place)
    if directory != store:
        show_as(directory, store)
    return directory
