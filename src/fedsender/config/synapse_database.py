"""Synapse's database settings as URLs of ours. A password is never part of one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import conninfo, pq
from sqlalchemy import URL

from fedsender.config.synapse_yaml import Settings, absolute, is_plain

# Of `args`, what belongs to Synapse's own pool and driver.
_NOT_LIBPQ: Final = ("cp_", "async", "connection_factory", "cursor_factory", "check_same_thread")
_OURS: Final = ("application_name", "fallback_application_name", "client_encoding")
_FILES: Final = ("sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir", "passfile")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_SECRET_WORDS: Final = ("password", "secret", "scram", "key_log")


@dataclass(frozen=True, slots=True)
class SynapseDatabase:
    """One of Synapse's databases.

    Attributes:
        url: without a password.
        setting: where the password stands, for an operator.
        left_out: settings that could not be carried over.
    """

    url: str
    setting: str
    password: str | None
    left_out: tuple[str, ...] = ()


def databases_of(settings: Settings) -> tuple[SynapseDatabase, SynapseDatabase | None]:
    """The main database and, where it is apart, that of the state groups. Raises ConfigError."""
    several, one = "databases" in settings, "database" in settings
    if several and one:
        raise settings.wrong("databases", "stands beside database: only one of them can be used")
    if not several:
        if not one and "database_path" in settings:
            return _sqlite(settings, "database_path"), None
        if not one:
            raise settings.wrong("database", "must be set")
        return _database(settings.section("database")), None
    found: dict[str, Settings] = {}
    for _, section in settings.section("databases").sections():
        for store in section.texts("data_stores") or ("main", "state"):
            if store in found:
                raise section.wrong("data_stores", "names a store that another database has")
            found[store] = section
    if "main" not in found or "state" not in found:
        raise settings.wrong("databases", "must have the data_stores main and state")
    main, state = found["main"], found["state"]
    return _database(main), None if main is state else _database(state)


def _database(section: Settings) -> SynapseDatabase:
    engine, args = section.text("name") or "sqlite3", section.section("args")
    if engine == "sqlite3":
        return _sqlite(args, "database")
    if engine != "psycopg2":
        raise section.wrong("name", "must be psycopg2 or sqlite3")
    return _postgresql(args)


def _sqlite(section: Settings, name: str) -> SynapseDatabase:
    path = section.path(name)
    if path is None or path.endswith("/:memory:"):
        raise section.wrong(name, "must be the path of a file")
    return SynapseDatabase(path, section.name_of("password"), None)


def _postgresql(args: Settings) -> SynapseDatabase:
    given = dict(_libpq(args))
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    secret = {name for name in given if any(word in name for word in _SECRET_WORDS)}
    password = given.pop("password", None)
    user = given.pop("user", None)
    name = given.pop("dbname", None)
    if password is not None and user is None:
        raise args.wrong("user", "must be set, as there is a password")
    kept = {key: text for key, text in given.items() if key in known - secret}
    left_out = [args.name_of(key) for key in given if key not in kept and key not in _OURS]
    place = _place(args, kept.pop("host", None), kept.pop("port", None))
    for key in _OURS:
        kept.pop(key, None)
    for key in _FILES:
        if key in kept and kept[key] != "system":
            kept[key] = absolute(kept[key], args.file)
    query: dict[str, str | tuple[str, ...]] = {**kept, **place[2]}
    if name is not None and not _PLAIN_NAME.fullmatch(name):
        # In a URL's path it would have to be written as it is.
        query["dbname"], name = name, None
    url = URL.create(
        "postgresql", username=user, host=place[0], port=place[1], database=name, query=query
    )
    return SynapseDatabase(
        url.render_as_string(), args.name_of("password"), password, tuple(left_out)
    )


def _libpq(args: Settings) -> Iterator[tuple[str, str]]:
    """All connection settings, those of a connection string first. Raises ConfigError."""
    for name in ("dsn", "database", "dbname"):
        text = args.text(name)
        if text is not None and (name == "dsn" or "=" in text or "://" in text):
            yield from _connection_string(args, name, text)
    for name in args.values:
        if name == "dsn" or name.startswith(_NOT_LIBPQ):
            continue
        value = args.values[name]
        text = str(int(value)) if isinstance(value, bool) else args.text(name)
        if text is None or (name in ("database", "dbname") and ("=" in text or "://" in text)):
            continue
        yield "dbname" if name == "database" else name, text


def _connection_string(args: Settings, name: str, text: str) -> Iterator[tuple[str, str]]:
    try:
        found = conninfo.conninfo_to_dict(text)
    except (psycopg.Error, ValueError):
        # Their own words quote it.
        raise args.wrong(name, "is not a connection string of PostgreSQL") from None
    for key, value in found.items():
        if value is not None:
            if not is_plain(str(value)):
                raise args.wrong(name, "is not a connection string of PostgreSQL")
            yield key, str(value)


Place = tuple[str | None, int | None, dict[str, str | tuple[str, ...]]]


def _place(args: Settings, host: str | None, port: str | None) -> Place:
    """Host, port and what of the two has to go into the query of a URL."""
    hosts = (host or "").split(",")
    ports = (port or "").split(",")
    numbers = [_port(args, text) for text in ports]
    if not all(_is_host(each) for each in hosts):
        raise args.wrong("host", "is not a host, an IP or the directory of a socket")
    if len(hosts) > 1:
        numbers = numbers * len(hosts) if len(numbers) == 1 else numbers
        if len(numbers) != len(hosts):
            raise args.wrong("port", "must be one, or as many as there are hosts")
        each = (f"{_in_brackets(one)}:{at or 5432}" for one, at in zip(hosts, numbers, strict=True))
        return None, None, {"host": tuple(each)}
    if hosts[0].startswith(("/", "@")):
        port_query: dict[str, str | tuple[str, ...]] = {"port": str(numbers[0])}
        return None, None, {"host": hosts[0], **(port_query if numbers[0] else {})}
    if numbers[0] and not hosts[0]:
        return None, None, {"port": str(numbers[0])}
    return hosts[0] or None, numbers[0], {}


def _port(args: Settings, text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536):
        raise args.wrong("port", "must be a port")
    return int(text)


def _is_host(text: str) -> bool:
    if text.startswith(("/", "@")):
        return True
    return all(char.isascii() and (char.isalnum() or char in "._-:%") for char in text)


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host
