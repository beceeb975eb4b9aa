"""The command line. Commands for a running daemon go through its admin endpoint.

Exit codes: 0: done. 1: it ran and found something wrong. 2: wrong usage or configuration. 75, of
pipeline jobs only: another job is at work (`fedsender_pipeline.commands`). An error that a user can
make is one line on standard error. Each command imports its modules when it runs, so that no
command waits for the others' imports.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer.exceptions import TyperException

from fedsender import version
from fedsender.admin import commands
from fedsender.admin.commands import DONE, USAGE, WRONG, AsJson, ConfigFile, Server
from fedsender.console import Mistake, say, say_alarm, say_json, say_text, show, utc_text

if TYPE_CHECKING:
    from fedsender.config import Config
    from fedsender.runtime import Runtime
    from fedsender.store.backup import Ours, Owner
    from fedsender.systemd import Kind

__all__ = ["app", "main", "run_command"]

MIGRATION_SECONDS: Final = 600.0
# The endpoint's refusals that the caller can put right: configuration and arguments.
_USAGE_STATUSES: Final = (400, 401, 403, 413)
_DASHBOARDS: Final = Path(__file__).parent / "dashboards"
_USER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}")
_CREDENTIAL: Final = re.compile(r"\$CREDENTIALS_DIRECTORY/([A-Za-z0-9_.-]+)")

app = typer.Typer(
    help="Delivers a Matrix homeserver's events to the servers of the federation.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0: done; 1: something is wrong; 2: wrong usage or configuration.",
    # All commands below take these from here.
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a configuration.")
db_app = typer.Typer(help="The databases.")
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(commands.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"fedsender {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version_wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """Take the options that stand before every command."""


def main() -> None:
    """The installed command."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    if not arguments:
        app(args=["--help"], prog_name="fedsender", standalone_mode=False)
        return USAGE
    if "" in arguments:
        # As a path it would be the current directory.
        return _complain("an argument is empty: a variable of the shell that is not set?", USAGE)
    try:
        code = app(args=list(arguments), prog_name="fedsender", standalone_mode=False)
    except (TyperException, Mistake) as error:
        text = error.format_message() if isinstance(error, TyperException) else str(error)
        return _complain(text, USAGE)
    except typer.Abort:
        return WRONG
    except Exception as error:
        return _explain(error)
    return code if isinstance(code, int) else DONE


def _complain(text: str, code: int) -> int:
    for line in text.splitlines() or [text]:
        say(f"fedsender: {line}", error=True)
    return code


def _loaded(config: Path, *, signs: bool = True) -> "tuple[Config, Runtime]":
    """The configuration, and what the outside is; as for `fedsender.config.load`."""
    from fedsender.config import load
    from fedsender.runtime import real_runtime

    return load(config, signs=signs), real_runtime()


def _explain(error: Exception) -> int:
    """Print errors with words for an operator, and return the exit code; raise any other again."""
    from fedsender.waiting import leaves

    found = leaves(error)
    codes = [_code_of(each) for each in found]
    if None in codes:
        raise error
    for text in dict.fromkeys(_words(each) for each in found):
        _complain(text, WRONG)
    return max(code for code in codes if code is not None)


def _words(error: BaseException) -> str:
    """The error's text; of one at a file the path and the reason, without a number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _code_of(error: BaseException) -> int | None:
    """The exit code of an error with words for an operator; None: it has none."""
    # Imported here, so that only a command that failed waits for them.
    from fedsender.admin.client import AdminError
    from fedsender.config import ConfigError
    from fedsender.config.document import OUR_LACK, OutOfReach
    from fedsender.federation.signing import BadSigningKey
    from fedsender.replication.feed import InstanceTaken
    from fedsender.runtime import CannotListen
    from fedsender.store import StoreError, WrongDatabase

    if isinstance(error, OutOfReach) or getattr(error, "errno", None) in OUR_LACK:
        return WRONG
    if isinstance(error, ConfigError | BadSigningKey | CannotListen | WrongDatabase):
        return USAGE
    if isinstance(error, AdminError):
        return USAGE if error.status in _USAGE_STATUSES else WRONG
    spoken = StoreError | InstanceTaken | OSError
    return WRONG if isinstance(error, spoken) else None


# --- the daemon -----------------------------------------------------------------------------------


@app.command()
def run(
    config: ConfigFile,
    shadow: Annotated[bool, typer.Option("--shadow", help="Follow, and send nothing.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another one runs under our name.")
    ] = False,
) -> int:
    """Run the daemon until SIGTERM or SIGINT."""
    import trio

    if shadow:
        from fedsender.switching import shadow as shadow_run

        return trio.run(shadow_run.run, config)
    from fedsender import daemon

    return trio.run(partial(daemon.run, config, standby=standby))


@app.command("systemd-unit")
def systemd_unit(
    config: Annotated[
        Path, typer.Option("-c", "--config", metavar="FILE", help="The file it runs with.")
    ] = Path("/etc/fedsender/config.yaml"),
    executable: Annotated[
        str | None, typer.Option(help="The installed command; else the one that is running.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run as this user; else as one made for it by systemd."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the unit and its directories; else fedsender, or fedsender-INSTANCE for one of"
            " several senders.",
        ),
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="For the relay instead.")] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="For a scheduled `pipeline run`, with its timer.")
    ] = False,
    template: Annotated[
        bool,
        typer.Option(
            "--template",
            help="For several senders: fedsender@INSTANCE runs with INSTANCE.yaml, beside --config."
            " Limits and secrets are those of --config.",
        ),
    ] = False,
) -> int:
    """Print a hardened systemd unit."""
    from fedsender.config import Federation, Sending
    from fedsender.limits import OF_RELAY, of_daemon
    from fedsender.systemd import unit_text

    if relay + pipeline + template > 1:
        raise Mistake("--relay, --pipeline and --template are units of their own: one at a time")

    if user is not None and not _USER_NAME.fullmatch(user):
        raise Mistake(f"{user[:100]!r} is not a user name")
    command = Path(executable or shutil.which(sys.argv[0]) or "/usr/bin/fedsender").absolute()
    # systemd hands over no file whose path has a "..".
    config = Path(os.path.abspath(config))
    for each in (command, config):
        if each.is_relative_to("/home") or each.is_relative_to("/root"):
            _complain(f"{each} is below a home directory, which the unit cannot see", DONE)
    loaded = _readable(config, signs=not (relay or pipeline))
    name = name or ("fedsender" if template else _unit_name(loaded, relay))
    if not _USER_NAME.fullmatch(name):
        raise Mistake(f"{name[:100]!r} cannot be a unit's name: give --name, 31 letters at most")
    kind: Kind = (
        "relay" if relay else "pipeline" if pipeline else "senders" if template else "sender"
    )
    sending = loaded.sending if loaded else Sending()
    limits = of_daemon(loaded.federation if loaded else Federation(), sending)
    if relay:
        limits = OF_RELAY
    text = unit_text(
        kind,
        executable=str(command),
        config=str(config),
        user=user,
        name=name,
        limits=limits,
        drain_s=sending.drain,
        credentials=_handed_over(loaded, kind) if loaded and user is None else None,
    )
    say_text(text)
    return DONE


def _readable(config: Path, *, signs: bool) -> "Config | None":
    """The configuration; None: it cannot be used, as a complaint says, and the defaults are."""
    from fedsender.config import ConfigError, load

    try:
        return load(config, signs=signs)
    except ConfigError as error:
        _complain(f"{error}\nso the unit has the usual limits and secrets", DONE)
        return None


def _handed_over(loaded: "Config", kind: "Kind") -> list[str]:
    """The names of the secrets that systemd hands over to a unit's own user; complains of those
    that it cannot hand over."""
    names = []
    for place, written in loaded.secrets():
        # A sender reads all of them at its start; the others are handed no more than they need.
        of_relay = place[0] in ("relay", "admin")
        of_database = str(place[-1]).endswith("database_password_file")
        if kind == "relay" and not of_relay:
            continue
        if kind == "pipeline" and (of_relay or not of_database):
            continue
        if credential := _CREDENTIAL.fullmatch(written):
            names.append(credential[1])
        else:
            text = f"{written}: only $CREDENTIALS_DIRECTORY/NAME is handed over to the unit's user"
            _complain(loaded.problem(place, f"{text}: write that, or say --user"), DONE)
    return list(dict.fromkeys(names))


def _unit_name(loaded: "Config | None", relay: bool) -> str:
    """The default name of the unit; one of several senders has its instance name in it."""
    if relay:
        return "fedsender-relay"
    several = loaded is not None and len(loaded.homeserver.federation_sender_instances) > 1
    return f"fedsender-{loaded.instance_name}" if loaded is not None and several else "fedsender"


@app.command()
def openapi(
    intake: Annotated[
        bool, typer.Option("--intake", help="Of the endpoint that a homeserver appends to.")
    ] = False,
) -> int:
    """Print the OpenAPI document of the admin endpoint."""
    import json

    if intake:
        from fedsender.embedded.endpoint import description
    else:
        from fedsender.admin.app import description

    say_text(json.dumps(description(), indent=1))
    return DONE


@app.command()
def probe(server: Server, config: ConfigFile, as_json: AsJson = False) -> int:
    """Try the way to a server, step by step, up to where a transaction would go."""
    import trio

    from fedsender.admin import reach
    from fedsender.matrix import is_server_name
    from fedsender.telemetry import configure_logging

    if not is_server_name(server):
        raise Mistake(f"{server[:300]!r} is not a server name")
    loaded, runtime = _loaded(config, signs=False)
    configure_logging(loaded.log, now_ms=runtime.now_ms)

    def seen(step: reach.Step) -> None:
        if not as_json:
            for line in step.printed():
                (say if step.ok else say_alarm)(line)

    report = trio.run(reach.probe, loaded, runtime, server, seen)
    if as_json:
        say_json(report.as_json())
    else:
        (say if report.failed is None else say_alarm)(report.summary)
    return DONE if report.failed is None else WRONG


@app.command("grafana-board")
def grafana_board() -> int:
    """Print a dashboard for Grafana 10 and newer, as JSON."""
    say_text((_DASHBOARDS / "board.json").read_text("utf-8"))
    return DONE


@app.command("alert-rules")
def alert_rules() -> int:
    """Print alert rules for Prometheus, as YAML."""
    say_text((_DASHBOARDS / "rules.yaml").read_text("utf-8"))
    return DONE


@db_app.command("upgrade")
def db_upgrade(config: ConfigFile) -> int:
    """Bring our own tables up to date. A Synapse's are never touched."""
    import trio

    from fedsender.store import store_config, upgrade_databases

    loaded, runtime = _loaded(config)
    settings = store_config(loaded)

    async def upgrade() -> None:
        with trio.fail_after(MIGRATION_SECONDS):
            await upgrade_databases(settings, runtime)

    try:
        trio.run(upgrade)
    except trio.TooSlowError:
        return _complain(f"not done within {MIGRATION_SECONDS:.0f} s", WRONG)
    say("the tables are up to date")
    return DONE


BackupDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The backup's directory.")]


@db_app.command("backup")
def db_backup(directory: BackupDirectory, config: ConfigFile) -> int:
    """Copy our own databases, all of one moment, into a new directory. The daemon may run."""
    import trio

    from fedsender.store import backup

    loaded, runtime = _loaded(config)
    copied = trio.run(backup.backup, *_what_is_ours(loaded), directory, runtime)
    for line, size in copied.items():
        say(f"{line} database: {size:,} bytes")
    if loaded.homeserver.kind == "synapse":
        say("not in it: the homeserver's database, which has Synapse's own backup")
    say(f"{directory}: whole; it holds content of events and messages")
    return DONE


@db_app.command("restore")
def db_restore(directory: BackupDirectory, config: ConfigFile) -> int:
    """With the daemon stopped: put the databases of a backup in the place of our own."""
    import trio

    from fedsender.store import backup

    loaded, runtime = _loaded(config)
    done = trio.run(backup.restore, *_what_is_ours(loaded), directory, runtime)
    say(f"restored: the databases of {utc_text(done.made_ms)}")
    say(
        f"void: the answers of servers since then ({done.answers:,} in the ledger);"
        " what they were for is sent again"
    )
    if loaded.homeserver.kind == "embedded" and loaded.feed.kind == "push":
        say("not in it: what was appended since then; the homeserver must append that again")
    for path in done.kept:
        say(f"the one that was there is {path} now")
    return DONE


def _what_is_ours(loaded: "Config") -> "tuple[Sequence[Ours], Owner]":
    from fedsender.store import backup, store_config

    owner = backup.Owner(loaded.server_name, loaded.instance_name, loaded.ledger.directory)
    return backup.ours(store_config(loaded).ours), owner


senders = typer.Typer(help="The senders of one database.", no_args_is_help=True)
app.add_typer(senders, name="senders")


@senders.command("list")
def list_senders(config: ConfigFile) -> int:
    """Print the list of senders in force, and who runs."""
    import trio

    from fedsender.switching.senders import describe_list

    for line in trio.run(describe_list, *_loaded(config)):
        say(line)
    return DONE


@senders.command("set")
def set_senders(names: str, config: ConfigFile) -> int:
    """Have the running senders go by the list NAMES, such as a,b,c: one that is new must run."""
    import trio

    from fedsender.switching.senders import change_list_of

    wanted = tuple(names.split(","))
    trio.run(change_list_of, *_loaded(config), wanted)
    say(f"in force: {', '.join(wanted)}")
    return DONE


@senders.command("free")
def free_name(name: str, config: ConfigFile) -> int:
    """Say that the machine that ran NAME is dead, so that another one may go on as NAME."""
    import trio

    from fedsender.store import free_lease, store_config

    loaded, runtime = _loaded(config)
    trio.run(free_lease, store_config(loaded), runtime, name)
    say(f"{name} is free")
    return DONE


@app.command("hand-back")
def hand_back(
    config: ConfigFile,
    accept_repeats: Annotated[
        bool, typer.Option("--accept-repeats", help="Although transactions are unanswered.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Although something will never be sent.")
    ] = False,
) -> int:
    """With the daemon stopped: hand over to the next sender, or list the obstacles."""
    import trio

    from fedsender.store import store_config
    from fedsender.switching import handback
    from fedsender.telemetry import configure_logging

    loaded, runtime = _loaded(config)
    configure_logging(loaded.log, now_ms=runtime.now_ms)

    hand = partial(handback.hand_back, accept_repeats=accept_repeats, accept_loss=accept_loss)
    found = trio.run(hand, loaded, store_config(loaded), runtime)
    for text in (*found.losses, *found.repeats):
        _complain(text, DONE)
    for note in found.notes:
        say(note)
    if not found.done:
        option = "--accept-loss" if found.losses else "--accept-repeats"
        return _complain(f"not handed back; deal with these first, or say {option}", WRONG)
    after = "Synapse's own sender" if loaded.homeserver.kind == "synapse" else "whoever sends next"
    say(f"handed back: {after} may start")
    return DONE


@config_app.command("check")
def config_check(
    config: ConfigFile,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print what holds for this server.",
            autocompletion=commands.known_servers,
        ),
    ] = None,
) -> int:
    """Check a configuration, and print each fault with its line."""
    from fedsender.config import load
    from fedsender.federation.signing import keys_of
    from fedsender.matrix import is_server_name
    from fedsender.tls import server_context

    loaded = load(config)
    if server is not None and not is_server_name(server):
        raise Mistake(f"{server[:300]!r} is not a server name")
    if problems := loaded.file_problems():
        return _complain("\n".join(problems), USAGE)
    keys_of(loaded)
    for section in (("feed", "push"), ("relay",)):
        loaded.server_tls(*section, context=server_context())
    warnings = loaded.warnings()
    for text in warnings:
        _complain(f"warning: {text}", DONE)
    if server is None:
        say(f"{config}: {'can be used, with warnings' if warnings else 'nothing wrong'}")
        return DONE
    from fedsender.admin import display

    allowed = "allowed" if loaded.allows(server) else "nothing is sent to it"
    handler = f"; the federation sender {loaded.sender_of(server)} handles it"
    say(f"{server}: {allowed}{'' if loaded.handles(server) else handler}")
    show(display.policy(loaded.explain_policy(server)))
    return DONE


@config_app.command("upgrade")
def config_upgrade(config: ConfigFile) -> int:
    """Print a configuration of an older release anew; on standard error, what is gone."""
    from fedsender.config import loads
    from fedsender.config.upgrade import upgraded

    made = upgraded(config)
    for note in made.notes:
        _complain(note, DONE)
    say_text(made.text)
    loads(made.text, directory=config.absolute().parent, file=f"{config}, upgraded")
    return DONE


@config_app.command("from-synapse")
def config_from_synapse(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="HOMESERVER.yaml [WORKER.yaml]...", help="As Synapse is given them."
        ),
    ],
    instance: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Be this one of several senders that share a database."),
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write secrets that stand in these files to files here."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Let the daemon keep all that it writes here."),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Let the admin endpoint listen here, with a new token."
        ),
    ] = None,
) -> int:
    """Print a configuration for a live Synapse; on standard error, the settings left out."""
    from fedsender.config.from_synapse import from_synapse, write_secrets

    made = from_synapse(files, instance=instance, secrets=secrets, state=state, admin=admin)
    if secrets is not None:
        write_secrets(made.secrets)
    for note in made.notes:
        _complain(note, DONE)
    say_text(made.text)
    return DONE


# The other products add theirs.
for _product in sorted(entry_points(group="fedsender.commands"), key=attrgetter("name")):
    _product.load()(app)
