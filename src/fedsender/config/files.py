"""The files that a configuration names, looked at before a start: a daemon that cannot read them
would call every server unreachable, and tell the homeserver so.
"""

import os
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedsender.config.document import ConfigError, Location, OutOfReach, cannot_be_read
from fedsender.config.policy import Section
from fedsender.config.values import read_secret, read_text

_SECRETS: Final = ("password_file", "token_file", "secret_file")
_TEXTS: Final = ("signing_key", "private_key_file", "certificate_file")
_OF_OUR_OWN: Final = ("token_file", "secret_file")
_SQLITE: Final = "sqlite:///"
_DATABASES: Final = ("sender_database", "database", "state_database")
_KEPT: Final = ("sender_database", "discovery_cache")
"""Files that we make for our user alone; one that is there keeps the mode it has."""


LEAST_SECRET: Final = 16
"""Characters of a token or secret that nobody finds by trying."""


def problems_with_files(section: Section) -> Iterator[tuple[Location, str]]:
    """What is wrong with the files that this section names, each with the place of its setting.

    Raises:
        OutOfReach: there is no telling now.
    """
    for at, path in _files(section, ()):
        name = _name(at)
        try:
            if name.endswith("_ca_files") or name == "ca_file":
                _load_authorities(path)
            elif name.endswith(_TEXTS):
                read_text(path)
            elif name.endswith(_SECRETS):
                read_secret(path)
            elif at == ("ledger", "directory"):
                _check_directory(path)
            elif name in _DATABASES:
                _check_database(path)
        except OutOfReach:
            raise
        except ConfigError as error:
            yield at, str(error)


def weak_files(section: Section) -> Iterator[tuple[Location, str]]:
    """Files of secrets and state that others may read or write, and secrets that are short."""
    for at, path in _files(section, ()):
        name = _name(at)
        if not name.endswith((*_SECRETS, *_TEXTS, *_KEPT)) or name == "certificate_file":
            continue
        try:
            mode = path.stat().st_mode
            secret = "" if name in _KEPT else read_text(path)
        except (OSError, ConfigError):
            continue
        if stat.S_ISREG(mode) and mode & (stat.S_IRWXO | stat.S_IWGRP):
            done = (
                "be read or written by others" if mode & stat.S_IRWXO else "be written by a group"
            )
            yield at, f"{path}: can {done} (mode {stat.S_IMODE(mode):o}; 600 or 640 is enough)"
        if name.endswith(_OF_OUR_OWN) and len(secret) < LEAST_SECRET:
            yield at, f"{path}: is short: {LEAST_SECRET} random characters are the least"


def _name(at: Location) -> str:
    """The setting's name; of an item of a list, the list's."""
    return next(str(each) for each in reversed(at) if isinstance(each, str))


def _files(value: object, at: Location) -> Iterator[tuple[Location, Path]]:
    if isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _files(getattr(value, name), (*at, name))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _files(each, (*at, key))
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _files(each, (*at, number))
    elif isinstance(value, Path):
        yield at, value
    elif isinstance(value, str) and value.startswith(_SQLITE):
        yield at, Path(value.removeprefix(_SQLITE))


def _check_directory(path: Path) -> None:
    """Raises ConfigError where files cannot be made in it. If it is not there yet, it may be made
    before a start, by somebody else: a service manager makes what `fedsender systemd-unit` names.
    """
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ConfigError(f"{there}: is not a directory")
    if there == path and not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{there}: is a directory that this user may not read and write")


def _check_database(path: Path) -> None:
    """Raises ConfigError where SQLite cannot keep a database there, and the files beside it."""
    _check_directory(path.parent)
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory, and must be a file")


def _load_authorities(path: Path) -> None:
    """Raises ConfigError where OpenSSL finds no certificates in it."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ConfigError(f"{path}: holds no certificates that can be used") from None
    except OSError as error:
        raise cannot_be_read(path, error) from None
