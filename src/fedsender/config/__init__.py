"""The configuration: one YAML file, checked whole before anything starts.

`load` returns a frozen `Config` or raises `ConfigError` with one line per problem, each naming the
file, line, column and setting. Whoever needs a part of it gets that section, not the whole.
"""

import difflib
import os
import re
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import orjson
from pydantic import (
    BeforeValidator,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import no_info_after_validator_function

from fedsender.config.document import (
    ConfigError,
    Document,
    Location,
    OutOfReach,
    cannot_be_read,
    dotted,
    parse_document,
    read_document,
)
from fedsender.config.feed import Feed, RedisFeed, TcpFeed
from fedsender.config.policy import (
    Contradictions,
    Destinations,
    EduKinds,
    Override,
    Policy,
    Section,
    leaves,
)
from fedsender.config.sections import (
    Admin,
    Consumer,
    Federation,
    Homeserver,
    Ledger,
    Log,
    Metrics,
    Pipeline,
    Presence,
    Relay,
    Sending,
    Spark,
)
from fedsender.config.values import (
    Address,
    Database,
    InstanceName,
    SecretPath,
    ServerName,
    ServerPattern,
    TcpAddress,
    UnixAddress,
    database_url,
    is_instance_name,
    is_variable,
    parse_duration,
    parse_size,
    read_secret,
    read_text,
)
from fedsender.matrix import Patterns, shard_of

__all__ = [
    "Address",
    "Config",
    "ConfigError",
    "EduKinds",
    "Federation",
    "Log",
    "Policies",
    "Policy",
    "PolicyLine",
    "Presence",
    "RedisFeed",
    "Relay",
    "Sending",
    "Spark",
    "TcpAddress",
    "TcpFeed",
    "UnixAddress",
    "database_url",
    "from_values",
    "is_instance_name",
    "load",
    "loads",
    "read_secret",
]


_NO_FILE: Final = Document("configuration", {}, {}, {})
_RELOADABLE = ("allow", "deny", "destinations", "log", "signing_key", "signing_key_id")


class _Contradictory(ValueError):
    """Values that are right one by one and wrong together."""

    def __init__(self, found: list[tuple[Location, str]]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.found = found


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """One setting that holds for a server, and its origin: `file:line`, or `default`."""

    field: str
    value: object
    source: str

    @property
    def text(self) -> str:
        """The value in words; all floats are durations."""
        return f"{self.value:g} s" if isinstance(self.value, float) else str(self.value)


_ServerPatterns = Annotated[
    Patterns,
    GetPydanticSchema(
        lambda _, schema_of: no_info_after_validator_function(
            Patterns, schema_of(tuple[ServerPattern, ...])
        )
    ),
]


class Config(Section):
    """Everything an operator decides."""

    server_name: ServerName = Field(description="The homeserver's name: origin of all we send.")
    instance_name: InstanceName = Field(
        default="fedsender",
        description="Our name among the homeserver's processes; only one may run.",
    )
    signing_key: SecretPath = Field(
        description="File with the homeserver's signing key: Synapse's lines (of several the first"
        " signs requests), a seed in base64, or PEM (PKCS 8). A reload reads it again."
    )
    signing_key_id: str | None = Field(
        default=None,
        pattern=r"^ed25519:[A-Za-z0-9_]{1,64}$",
        description="The key's id, such as ed25519:a_1, where the file does not say it: Synapse's"
        " lines do, a seed and PEM do not.",
    )
    homeserver: Homeserver = Field(default_factory=Homeserver)
    sender_database: Database = Field(
        default="fedsender.sqlite3",
        description="Our own tables: a file for SQLite, or a postgresql:// URL.",
    )
    sender_database_password_file: SecretPath | None = Field(
        default=None, description="File with the password of that database's user."
    )
    feed: Feed = Field(default_factory=Feed)
    federation: Federation = Field(default_factory=Federation)
    sending: Sending = Field(default_factory=Sending)
    allow: _ServerPatterns = Field(
        default=Patterns(("*",)),
        description="Send only to servers that match one of these names or patterns (Synapse's"
        " federation_domain_whitelist).",
    )
    deny: _ServerPatterns = Field(
        default=Patterns(),
        description="Never send to servers that match one of these, whatever allows them."
        " evil.example is also evil.example:443, and *.evil.example all below it.",
    )
    destinations: Destinations = Field(default_factory=Destinations)
    ledger: Ledger = Field(default_factory=Ledger)
    pipeline: Pipeline = Field(default_factory=Pipeline)
    relay: Relay = Field(default_factory=Relay)
    admin: Admin = Field(default_factory=Admin)
    metrics: Metrics = Field(default_factory=Metrics)
    log: Log = Field(default_factory=Log)

    _document: Document = PrivateAttr(default_factory=lambda: _NO_FILE)

    def policy_for(self, server: str) -> Policy:
        """How `server` is treated. Worth remembering."""
        return self.destinations.policy_for(server)

    def allows(self, server: str) -> bool:
        """Whether anything may be sent to `server`: not us, allowed and not denied.

        Worth remembering.
        """
        return self.refusal(server) is None

    def refusal(self, server: str) -> str | None:
        """Why nothing may be sent to `server`, in a few words; None: it may."""
        if server == self.server_name:
            return "it is our own server_name"
        if denied := self.deny.matching(server):
            return f"deny has {self.deny[denied[0]]}"
        return None if self.allow.matching(server) else "allow does not have it"

    def lists(self) -> dict[str, Any]:
        """The lists that `allows` goes by, as values of a configuration; empty: all are allowed."""
        if self.allow == ("*",) and not self.deny:
            return {}
        return {"allow": list(self.allow), "deny": list(self.deny)}

    def handles(self, server: str) -> bool:
        """Whether `server` is ours among the federation senders, by Synapse's hash."""
        return self.sender_of(server) == self.instance_name

    def sender_of(self, server: str) -> str:
        """Which of the federation senders handles `server`."""
        senders = self.senders
        return senders[shard_of(server, len(senders))]

    @property
    def senders(self) -> tuple[str, ...]:
        """The names of all federation senders, in order."""
        return self.homeserver.federation_sender_instances or (self.instance_name,)

    def with_senders(self, senders: tuple[str, ...]) -> "Config":
        """This configuration with the list of senders that is in force."""
        update = {"federation_sender_instances": senders}
        mixed = self.model_copy(update={"homeserver": self.homeserver.model_copy(update=update)})
        mixed._document = self._document
        return mixed

    def with_reloadable(self, newer: "Config") -> "Config":
        """This configuration, with those settings of `newer` that can change while running.

        Raises:
            ConfigError: they contradict a setting of ours that cannot.
        """
        update = {name: getattr(newer, name) for name in _RELOADABLE}
        mixed = self.model_copy(update=update)
        mixed._document = newer._document
        found = [newer.problem(place, text) for place, text in mixed.all_contradictions()]
        if found:
            raise ConfigError(*found)
        return mixed

    def differences(self, other: "Config") -> list[str]:
        """The settings that are not the same in `other`, as `section.setting`."""
        theirs = dict(leaves(other))
        return [dotted(place) for place, value in leaves(self) if theirs[place] != value]

    def explain_policy(self, server: str) -> list[PolicyLine]:
        """Every setting that holds for `server`, and the line that set it."""
        lines = []
        for field, value, places in self.destinations.settings_for(server):
            sources = (self._document.source(("destinations", *place)) for place in places)
            lines.append(PolicyLine(field, value, next(filter(None, sources), "default")))
        return lines

    def file_problems(self, *sections: str) -> list[str]:
        """What keeps a process from starting, one line each: errors in files of secrets and
        certificates, and a file that must be named.

        Args:
            sections: only in these; without any, in all.
        """
        missing = [(("feed", *place), text) for place, text in self.feed.missing()]
        return [
            self.problem(location, text)
            for location, text in (*problems_with_files(self), *missing)
            if not sections or location[0] in sections
        ]

    def server_tls(self, *section: str, context: ssl.SSLContext) -> ssl.SSLContext | None:
        """The TLS context of a section's listener; None: it speaks no TLS.

        The section has `certificate_file` and `private_key_file`. These are read into `context`,
        which may be in use: then it is for the handshakes to come. Raises ConfigError.
        """
        its: Any = reduce(getattr, section, self)
        if its.certificate_file is None:
            return None
        try:
            # A key with a passphrase must not make OpenSSL ask for it on the terminal.
            context.load_cert_chain(its.certificate_file, its.private_key_file, password="")
        except (OSError, ValueError) as error:
            place = (*section, "certificate_file")
            raise ConfigError(self.problem(place, f"cannot be used: {error}")) from error
        return context

    def warnings(self, *sections: str) -> list[str]:
        """The settings that can be used, and that are not safe or perhaps not meant, one line each;
        sections as for `file_problems`."""
        clear = [(("feed", *place), text) for place, text in self.feed.warnings()]
        proxy = self.federation.proxy.warnings()
        clear += [(("federation", "proxy", *place), text) for place, text in proxy]
        if not self.allow:
            clear.append((("allow",), "is empty: nothing is sent to any server"))
        found = (*weak_files(self), *clear, *surprising_units(self, self._document.values))
        return [
            self.problem(location, text)
            for location, text in found
            if not sections or location[0] in sections
        ]

    def secrets(self) -> Iterator[tuple[Location, str]]:
        """Each file of a secret, as the configuration names it, and the place of its setting."""
        for at, path in _files(self):
            written = _value_at(self._document.values, at)
            is_secret = _name(at).endswith((*_SECRETS, *_KEYS)) and not is_variable(path)
            if is_secret and isinstance(written, str):
                yield at, written

    def problem(self, location: Location, text: str) -> str:
        """`text` as a line that names the file, the place of a setting, and the setting."""
        return self._document.problem(location, text)

    @model_validator(mode="after")
    def _hangs_together(self) -> "Config":
        if found := list(self.all_contradictions()):
            raise _Contradictory(found)
        return self

    def contradictions(self) -> Contradictions:
        if self.homeserver.kind == "embedded" and self.feed.kind == "redis":
            yield (
                ("feed", "kind"),
                "redis is Synapse's: homeserver.kind embedded needs push, tcp or relay",
            )
        many_writers = len(self.homeserver.event_writers) > 1
        if self.homeserver.kind == "synapse" and self.feed.kind == "tcp" and many_writers:
            yield ("homeserver", "event_writers"), "must be one with feed.kind tcp"
        if _file_of(self.sender_database) == _file_of(self.homeserver.database) is not None:
            yield ("sender_database",), "is homeserver.database, too: each needs a file of its own"
        if self.homeserver.kind == "synapse" and self.feed.kind in ("relay", "push"):
            place = ("feed", "kind")
            yield place, f"{self.feed.kind} fills tables of ours: homeserver.kind must be embedded"
        if len(self.senders) > 1:
            databases: dict[Location, str] = {
                ("sender_database",): self.sender_database,
                ("homeserver", "database"): self.homeserver.database,
            }
            for where, url in databases.items():
                if _file_of(url) is not None:
                    names = "homeserver.federation_sender_instances"
                    yield where, f"must be one PostgreSQL for all senders: {names} has several"
        alone = _file_of(self.sender_database) is not None
        if alone and self.instance_name not in self.senders:
            place = ("homeserver", "federation_sender_instances")
            yield place, f"does not name {self.instance_name!r}, our instance_name"
        yield from _same_addresses(self)
        if self.sending.max_in_flight > self.federation.max_connections:
            yield ("sending", "max_in_flight"), "is larger than federation.max_connections"
        if self.sending.window_bytes < self.destinations.defaults.max_transaction_bytes:
            yield ("sending", "window_bytes"), "is smaller than one transaction"


def _same_addresses(config: Config) -> Contradictions:
    """Endpoints that would listen where another one does."""
    listening: list[tuple[Location, TcpAddress | UnixAddress]] = [
        (("admin", "listen"), config.admin.listen)
    ]
    if config.metrics.listen is not None:
        listening.append((("metrics", "listen"), config.metrics.listen))
    if config.feed.kind == "push":
        listening.append((("feed", "push", "listen"), config.feed.push.listen))
    for number, (place, address) in enumerate(listening):
        for other, taken in listening[:number]:
            if _collide(address, taken):
                yield place, f"is the address of {dotted(other)}: each needs one of its own"


def _collide(one: TcpAddress | UnixAddress, other: TcpAddress | UnixAddress) -> bool:
    if isinstance(one, UnixAddress) or isinstance(other, UnixAddress):
        return one == other
    hosts = {one.host, other.host}
    return one.port == other.port != 0 and (len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"}))


def _file_of(database: str) -> str | None:
    """SQLite's file; None: it is another kind of database."""
    scheme, _, path = database.partition(":///")
    return os.path.normpath(path) if scheme == "sqlite" else None


def load(path: Path, *, signs: bool = True) -> Config:
    """Read and check a configuration file.

    Files that it names are not opened: see `Config.file_problems`.

    Args:
        signs: whether it is for a process that sends; another needs no signing key.

    Raises:
        ConfigError: it cannot be used; one line for each problem found.
    """
    document = read_document(path)
    if not signs and "signing_key" not in document.values:
        document = replace(document, values={**document.values, "signing_key": "none"})
    return _checked(document, path.absolute().parent)


def loads(text: str, *, directory: Path, file: str = "configuration") -> Config:
    """As `load`, from a text; files are relative to `directory`, `file` is for messages."""
    return _checked(parse_document(text, file=file), directory)


def from_values(values: Mapping[str, object], *, directory: Path) -> Config:
    """As `load`, from plain values as YAML would give them."""
    return _checked(replace(_NO_FILE, values=values), directory)


def _with_feed(values: Mapping[str, object]) -> Mapping[str, object]:
    """Where the homeserver is a Synapse, `feed.kind` is redis unless the file says other."""
    homeserver, feed = values.get("homeserver"), values.get("feed", {})
    synapse = isinstance(homeserver, Mapping) and homeserver.get("kind") == "synapse"
    if synapse and isinstance(feed, Mapping) and "kind" not in feed:
        return {**values, "feed": {**feed, "kind": "redis"}}
    return values


def _checked(document: Document, directory: Path) -> Config:
    # By way of JSON: there, pydantic's strict mode takes a list for a tuple and text for a path.
    try:
        config = Config.model_validate_json(
            orjson.dumps(_with_feed(document.values)), context={"directory": directory}
        )
    except ValidationError as error:
        lines = (line for each in error.errors() for line in _problems(document, each))
        raise ConfigError(*lines) from None
    config._document = document
    return config


_GONE: Final[Mapping[str, str]] = {
    "destinations.defaults.backoff.ceiling_dead": "it is a day, or backoff.ceiling; remove it",
    "destinations.defaults.backoff.jitter": "a wait is up to 20 % longer or shorter; remove it",
    "destinations.defaults.backoff.multiplier": "each wait is twice the one before; remove it",
    "destinations.defaults.backoff.steady": "it is ten seconds, or backoff.first; remove it",
    "destinations.defaults.edus.device_lists": "encryption needs them; remove it",
    "destinations.defaults.edus.to_device": "encryption needs them; remove it",
    "destinations.defaults.max_edus": "a transaction has the 100 that Matrix allows; remove it",
    "destinations.defaults.priority": "at a start those go first that were well lately; remove it",
    "federation.connect_timeout": "it is ten seconds; remove it",
    "federation.discovery_cache": "a table of sender_database has it; remove it, and the file",
    "federation.handshake_timeout": "it is 15 seconds; remove it",
    "federation.idle_connection": "a connection is closed after two minutes without use; remove it",
    "federation.max_answer_bytes": "an answer has 64 KiB, and 4 KiB more for each PDU; remove it",
    "federation.request_timeout": "write destinations.defaults.request_timeout",
    "feed.redis.host": "address has it: address: localhost:6379",
    "feed.redis.path": "address has it: address: unix:/path",
    "feed.redis.port": "address has it: address: localhost:6379",
    "feed.relay.fetch_parallel": "four connections fetch a snapshot; remove it",
    "feed.relay.name": "all senders have one name there, fedsender; remove it",
    "feed.tcp.name": "instance_name is the name there, too; remove it",
    "ledger.segment_bytes": "a file has 64 MiB, or a quarter of ledger.keep_bytes; remove it",
    "ledger.segment_every": "a new file begins each hour; remove it",
    "notify": "a timer and the exit code of `fedsender status` do this: docs/monitoring.md, Mail",
    "pipeline.connections": "one connection reads a database; remove it",
    "pipeline.health": "`pipeline health` and the report say it; remove it, and the file",
    "pipeline.relay": "an audit reads our own store and the ledger; remove it",
    "pipeline.relay_password_file": "an audit reads our own store and the ledger; remove it",
    "pipeline.service_share": "the goal is 99 % of the servers; remove it",
    "pipeline.service_within": "the goal is five seconds; remove it",
    "relay.consumer_ttl": "a sender keeps its place in the log for a day; remove it",
    "relay.fetch_bytes_per_second": "a snapshot is fetched as fast as the network is; remove it",
    "relay.join_ttl": "a snapshot that nobody goes on from is forgotten in 30 min; remove it",
    "relay.max_consumers": "64 senders are known at once; remove it",
    "relay.secret_file": "each consumer has its own, relay.consumers.NAME.secret_file",
    "sending.fan_out_chunk": "a transaction fans out 100 events; remove it",
    "sending.in_flight_bytes": "transactions under way have 64 MiB; remove it",
    "sending.max_connections_slow_share": "slow and failing servers have half; remove it",
    "sending.trickle_per_second": "50 servers a second are told of receipts; remove it",
}
"""Settings that an older release knew, and what to do instead."""
_OVERRIDE: Final = re.compile(r"^destinations\.overrides\[\d+\]")
"""An override has the settings of the defaults."""


def instead_of(location: Location) -> str | None:
    """What to do instead of this setting, which is gone; None: it is not."""
    return _GONE.get(_OVERRIDE.sub("destinations.defaults", dotted(location)))


def _problems(document: Document, error: ErrorDetails) -> Iterator[str]:
    """One problem as pydantic tells it, as lines for an operator."""
    location, kind, context = error["loc"], error["type"], error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, _Contradictory):
        for place, text in cause.found:
            yield document.problem(place, text)
    elif kind == "extra_forbidden":
        gone = instead_of(location)
        text = f"unknown setting{_suggestion(location)}" if gone is None else f"is gone: {gone}"
        yield document.problem(location, text, at_key=True)
    else:
        yield document.problem(location, _sentence(kind, context, error["msg"]))


def _sentence(kind: str, context: Mapping[str, Any], message: str) -> str:
    sentences = {
        "missing": "must be set",
        "bool_type": "must be true or false",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text (put it in quotes)",
        "tuple_type": "must be a list",
        "path_type": "must be text (the path of a file)",
        "model_type": "must hold settings, one per line",
        "string_pattern_mismatch": "has characters that are not allowed here",
    }
    if kind in sentences:
        return sentences[kind]
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if "error" in context:
        return str(context["error"])
    return message.replace("Input should be", "must be").replace("Tuple should have", "must have")


def _suggestion(location: tuple[str | int, ...]) -> str:
    names = _names_at(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


_OF_ITEMS: Mapping[str, type[Section]] = {"overrides": Override, "consumers": Consumer}


def _names_at(location: tuple[str | int, ...]) -> list[str]:
    """The settings that the section at `location` knows."""
    section: type[Section] = Config
    for part in location:
        if isinstance(part, int) or part not in section.model_fields:
            continue  # An item of a list, or the name of a consumer.
        if part in _OF_ITEMS:
            section = _OF_ITEMS[part]
            continue
        default = section.model_fields[part].get_default(call_default_factory=True)
        section = type(default)
    return list(section.model_fields)


class Policies:
    """The configuration's answers about one server.

    They may be handed on: they are those of the configuration that is in use when they are asked.

    Attributes:
        policy_for: the policy of a server.
        may_send_to: whether anything may be sent to a server, by us.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy_for = lru_cache(20_000)(lambda server: self.config.policy_for(server))
        self.may_send_to = lru_cache(20_000)(
            lambda server: self.config.handles(server) and self.config.allows(server)
        )

    def use(self, config: Config) -> None:
        """Follow this configuration from now on."""
        self.config = config
        self.policy_for.cache_clear()
        self.may_send_to.cache_clear()

    def handles(self, server: str) -> bool:
        """Whether this server belongs to our shard, allowed or not."""
        return self.config.handles(server)


_SECRETS: Final = ("password_file", "token_file", "secret_file")
_KEYS: Final = ("signing_key", "private_key_file")
_OF_OUR_OWN: Final = ("token_file", "secret_file")
_SQLITE: Final = "sqlite:///"
_DATABASES: Final = ("sender_database", "database", "state_database")
_KEPT: Final = ("sender_database",)
"""Files that we make for our user alone; one that is there keeps the mode it has."""


LEAST_SECRET: Final = 16
"""Characters of a token or secret that cannot be found by trying."""


def problems_with_files(section: Section) -> Iterator[tuple[Location, str]]:
    """The errors in the files that this section names, each with the place of its setting.

    Raises:
        OutOfReach: there is no telling now.
    """
    for at, path in _files(section):
        name = _name(at)
        try:
            if name.endswith("_ca_files") or name == "ca_file":
                _load_authorities(path)
            elif name.endswith((*_KEYS, "certificate_file")):
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
    for at, path in _files(section):
        name = _name(at)
        if not name.endswith((*_SECRETS, *_KEYS, *_KEPT)):
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


def surprising_units(
    section: Section, written: Mapping[str, object]
) -> Iterator[tuple[Location, str]]:
    """Durations and sizes that may have been meant otherwise than they are read."""
    for at, _, info in _walk(section):
        if info is None:
            continue
        value = _value_at(written, at)
        if _is_parsed_by(parse_duration, info) and isinstance(value, int | float) and value:
            yield at, f"{value} has no unit, and is {value} s"
        if _is_parsed_by(parse_size, info) and isinstance(value, str):
            number, unit = parse_size(value), value.lstrip("0123456789 ")
            if unit in ("kB", "MB", "GB", "TB"):
                binary = value.replace(unit, f"{unit[0].upper()}iB")
                yield at, f"{value} is {number:,} bytes; {binary} would be {parse_size(binary):,}"


def _walk(
    value: object, at: Location = (), info: FieldInfo | None = None
) -> Iterator[tuple[Location, object, FieldInfo | None]]:
    """Each setting in a section, with its place, and its field; an item of a list has none."""
    inside: Iterable[tuple[str | int, object, FieldInfo | None]] = ()
    if isinstance(value, Section):
        fields = type(value).model_fields.items()
        inside = ((name, getattr(value, name), each) for name, each in fields)
    elif isinstance(value, dict):
        inside = ((key, each, None) for key, each in value.items())
    elif isinstance(value, tuple):
        inside = ((number, each, None) for number, each in enumerate(value))
    yield at, value, info
    for part, each, field in inside:
        yield from _walk(each, (*at, part), field)


def _value_at(values: object, at: Location) -> object:
    for part in at:
        try:
            values = values[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _is_parsed_by(parser: Callable[[object], object], info: FieldInfo) -> bool:
    """Whether a field takes its value by this function, or null."""
    # Pydantic moves what stands at the top of an annotation to the field.
    noted = [*info.metadata, *(m for each in get_args(info.annotation) for m in get_args(each))]
    return any(isinstance(each, BeforeValidator) and each.func is parser for each in noted)


def _name(at: Location) -> str:
    """The setting's name; of an item of a list, the list's."""
    return next(str(each) for each in reversed(at) if isinstance(each, str))


def _files(section: Section) -> Iterator[tuple[Location, Path]]:
    for at, value, _ in _walk(section):
        if isinstance(value, Path):
            yield at, value
        elif isinstance(value, str) and value.startswith(_SQLITE):
            yield at, Path(value.removeprefix(_SQLITE))


def _check_directory(path: Path) -> None:
    """Raises ConfigError where files cannot be made in it. If it is not there yet, it may be made
    before a start, by another program: a service manager makes the directories that `fedsender
    systemd-unit` names.
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
