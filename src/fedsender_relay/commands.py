"""`fedsender relay`: run one, look at it, forget a consumer."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsender.admin.commands import DONE, WRONG, AsJson, ConfigFile
from fedsender.admin.display import Column, Sheet, duration, lasting
from fedsender.console import Mistake, say, say_answer, say_json, show

Answer = Mapping[str, Any]


def facts(answer: Answer) -> Iterator[str]:
    """The facts of a status, one line each."""
    yield f"relay of {answer['server_name']}, history {answer['epoch']}"
    mib = answer["log_bytes"] / 2**20
    yield (
        f"log: {answer['first']} to {answer['head']},"
        f" {mib:.1f} MiB ({answer['cap_used']:.0%} of what it may be)"
    )
    if answer["held_by"] is not None:
        yield f"oldest pin: {answer['oldest_pin']}, held by {answer['held_by']}"
    for snapshot in answer["snapshots"][-1:]:
        yield f"newest snapshot: {snapshot['token']}, {duration(snapshot['age_s'])} old"
    if answer["full_syncs"]:
        reasons = (f"{count} {reason}" for reason, count in sorted(answer["full_syncs"].items()))
        yield f"snapshots handed out: {', '.join(reasons)}"
    for problem in answer["problems"]:
        yield f"wrong: {problem}"


def consumers(found: Sequence[Answer]) -> Sheet:
    """The consumers, one row each."""
    shown = Sheet(
        Column("CONSUMER"),
        Column("STATE"),
        Column("PIN", 5),
        Column("BEHIND", 1),
        Column("FOR", 3),
        Column("LAST SEEN", 4),
        Column("LAST ERROR", 2, 26),
    )
    for one in found:
        shown.add(
            one["name"],
            one["state"],
            one["pin"],
            one["lag_tokens"],
            lasting(one["lag_s"]) if one["lag_tokens"] else None,
            "connected" if one["connected"] else f"{duration(one['seen_s'])} ago",
            one["error"],
        )
    return shown


app = typer.Typer(
    help="The hub between a homeserver and any number of senders.", invoke_without_command=True
)


def add_to(whole: typer.Typer) -> None:
    """Add `fedsender relay` to the command line."""
    whole.add_typer(app, name="relay")


@app.callback()
def relay(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", envvar="FEDSENDER_CONFIG", metavar="FILE", help="The YAML file."
        ),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another relay has our database.")
    ] = False,
) -> int:
    """Run the relay until SIGTERM or SIGINT, or one of the commands below."""
    if context.invoked_subcommand is not None:
        return DONE
    if config is None:
        raise Mistake("Missing option '-c' / '--config'.")
    import trio

    from fedsender_relay import process

    return trio.run(partial(process.run, config, standby=standby))


@app.command()
def status(config: ConfigFile, as_json: AsJson = False) -> int:
    """Show the log, its consumers and all problems; 1 if there is a problem."""
    answer = _client(config).get("relay")
    if as_json:
        say_json(answer)
    else:
        for line in facts(answer):
            say(line)
        if answer["consumers"]:
            show(consumers(answer["consumers"]))
    return WRONG if answer["problems"] else DONE


@app.command()
def forget(name: str, config: ConfigFile, as_json: AsJson = False) -> int:
    """Forget a consumer that is not connected; the log kept for it may go."""
    answer = _client(config).post("relay", "forget", body={"name": name})
    say_answer(answer, as_json, f"forgotten: {answer['forgotten']}")
    return DONE


def _client(config: Path) -> Any:
    from fedsender.admin.client import AdminClient
    from fedsender.config import load

    return AdminClient.of(load(config, signs=False))
