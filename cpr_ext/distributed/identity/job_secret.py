"""The secret that the processes of one job share: a process that knows it belongs to the job.

It crosses in a file or in the environment, never on a command line, and no message holds it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cpr_ext.errors import UsageError

SECRET, SECRET_FILE = "CPR_JOB_SECRET", "CPR_JOB_SECRET_FILE"
_LEAST_CHARACTERS = 32
_MOST_BYTES = 4096
_REMEDY = (
    f"make one with `(umask 077; openssl rand -hex 32 > job.secret)` and set {SECRET_FILE} to its "
    "path for the rendezvous' host and for every worker"
)


def read_secret(environment: Mapping[str, str]) -> str | None:
    """Read the job's secret from the environment, or from the file that it names.

    Returns:
        The secret; None if neither variable is set.

    Raises:
        UsageError: the file cannot be read, or the secret is too short to be one.
    """
    if path := environment.get(SECRET_FILE):
        try:
            with Path(path).open("rb") as file:
                secret = file.read(_MOST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{SECRET_FILE}: the job's secret cannot be read from '{path}': "
                f"{getattr(error, 'strerror', None) or 'it is no text'}; {_REMEDY}"
            ) from None
        source = f"the secret in '{path}'"
    elif (found := environment.get(SECRET)) is not None:
        secret, source = found.strip(), f"the secret in {SECRET}"
    else:
        return None
    if len(secret) < _LEAST_CHARACTERS:
        raise UsageError(
            f"{source} has {len(secret)} characters; needed: at least {_LEAST_CHARACTERS} that "
            f"nobody can guess; {_REMEDY}"
        )
    return secret


def require_secret(secret: str | None, place: str) -> bytes:
    """Return ``secret`` as a key.

    Raises:
        UsageError: there is none, so that any process that reaches ``place`` could join the job.
    """
    if secret is None:
        raise UsageError(
            f"the job has no secret, so that any process that reaches the rendezvous at {place} "
            f"could join it; {_REMEDY}. `cpr launch` on one machine makes one by itself"
        )
    return secret.encode()


def hold_secret(environment: MutableMapping[str, str]) -> None:
    """Keep the job's secret in this process's memory, for the processes that it starts.

    They read it by ``/proc`` as long as this process lives. It is on no disk and in no environment.
    Without a secret in the environment a new one is made; a file that is named already stays.

    Raises:
        UsageError: see :func:`read_secret`.
    """
    secret = read_secret(environment) or secrets.token_hex(32)
    environment.pop(SECRET, None)
    if not environment.get(SECRET_FILE):
        held = os.memfd_create("job.secret")
        os.write(held, secret.encode())
        environment[SECRET_FILE] = f"/proc/{os.getpid()}/fd/{held}"
