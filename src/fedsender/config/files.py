"""The files that a configuration names, looked at before a start: a daemon that cannot read them
would call every server unreachable, and tell the homeserver so.
"""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedsender.config.document import ConfigError, Location
from fedsender.config.policy import Section
from fedsender.config.values import read_secret

_TEXTS: Final = (
    *("signing_key", "password_file", "token_file", "secret_file"),
    *("private_key_file", "certificate_file"),
)


def problems_with_files(section: Section, at: Location = ()) -> Iterator[tuple[Location, str]]:
    """What is wrong with the files that this section names, each with the place of its setting."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        yield from _problems(name, value, (*at, name))


def _problems(name: str, value: object, at: Location) -> Iterator[tuple[Location, str]]:
    if isinstance(value, Section):
        yield from problems_with_files(value, at)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _problems(name, each, (*at, number))
    elif isinstance(value, Path):
        try:
            if name.endswith("_ca_files") or name == "ca_file":
                _load_authorities(value)
            elif name.endswith(_TEXTS):
                read_secret(value)
        except ConfigError as error:
            yield at, str(error)


def _load_authorities(path: Path) -> None:
    """Raises ConfigError where OpenSSL finds no certificates in it."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ConfigError(f"{path}: holds no certificates that can be used") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
