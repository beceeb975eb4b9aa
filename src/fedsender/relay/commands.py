"""`fedsender relay`: run one, look at it, forget a consumer."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsender.admin.commands import DONE, WRONG, AsJson, ConfigFile, Mistake
from fedsender.console import say, say_json, say_text, show

app = typer.Typer(
    help="The hub between a homeserver and any number of senders.", invoke_without_command=True
)


@app.callback()
def relay(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", envvar="FEDSENDER_CONFIG", metavar="FILE", help="The YAML file."
        ),
    ] = None,
) -> int:
    """Run the relay until SIGTERM or SIGINT, or one of the commands below."""
    if context.invoked_subcommand is not None:
        return DONE
    if config is None:
        raise Mistake("Missing option '-c' / '--config'.")
    import trio

    from fedsender.relay import process

    return trio.run(process.run, config)


@app.command()
def status(config: ConfigFile, as_json: AsJson = False) -> int:
    """Show the log, who follows it, and what is wrong; 1 if anything is."""
    answer = _client(config).get("relay")
    if as_json:
        say_json(answer)
    else:
        from fedsender.relay.showing import consumers, facts

        for line in facts(answer):
            say(line)
        if answer["consumers"]:
            show(consumers(answer["consumers"]))
    return WRONG if answer["doubts"] else DONE


@app.command()
def forget(name: str, config: ConfigFile, as_json: AsJson = False) -> int:
    """Forget a consumer that is not connected; what was kept for it may go."""
    answer = _client(config).post("relay", "forget", body={"name": name})
    if as_json:
        say_json(answer)
    else:
        say(f"forgotten: {answer['forgotten']}")
    return DONE


@app.command()
def openapi(
    admin: Annotated[
        bool, typer.Option("--admin", help="Of the endpoint for operators instead.")
    ] = False,
) -> int:
    """Print the OpenAPI document of the endpoint that a homeserver appends to."""
    import json

    from fedsender.intake import endpoint
    from fedsender.relay import admin_app

    document: dict[str, Any] = (admin_app if admin else endpoint).description()
    say_text(json.dumps(document, indent=1))
    return DONE


def _client(config: Path) -> Any:
    from fedsender.admin.client import AdminClient
    from fedsender.config import load

    return AdminClient.of(load(config, signs=False))
