"""The lab's commands: the demo, the simulation, the benchmarks."""

from pathlib import Path
from typing import Annotated, Final

import typer

from fedsender.admin.commands import AsJson

_REST: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(demo)
    app.command()(plant)
    for command in (simulate, bench):
        app.command(context_settings=_REST, add_help_option=False)(command)


def demo(
    servers: Annotated[int | None, typer.Option(help="Receiving servers; 20, or 100.")] = None,
    rooms: Annotated[int, typer.Option(help="Rooms.")] = 10,
    events: Annotated[int, typer.Option(help="Events.")] = 500,
    chaos: Annotated[bool, typer.Option("--chaos", help="With much going wrong.")] = False,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="Beside three hostile servers for each one.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="For so long; 5, with --chaos 14, with --hostile 600."),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="With --hostile: through a forward proxy.")
    ] = False,
    relay: Annotated[bool, typer.Option("--relay", help="Through the relay.")] = False,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Leave all files here.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same history.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Run a complete example: a homeserver, the daemon, servers that receive."""
    from fedsender_lab.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            servers=servers or (100 if hostile else 20),
            rooms=rooms,
            events=events,
            chaos=chaos,
            hostile=hostile,
            seconds=seconds,
            proxy=proxy,
            relay=relay,
            keep=keep,
            as_json=as_json,
            seed=seed,
        )
    )


def plant(
    left: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `demo --keep` has left; or a test server's.")
    ],
    worlds: Annotated[list[str] | None, typer.Argument(help="Some of them; else all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Plant faults into copies of a ledger and its database, and see that an audit names each."""
    from fedsender_pipeline.commands import needing_extra

    with needing_extra():
        from fedsender_lab.planted import plant as run
    return run(left, worlds, as_json=as_json)


def simulate(context: typer.Context) -> int:
    """Run the whole daemon on a virtual clock, in a network that misbehaves."""
    from fedsender_lab.simulation import main

    return main(context.args)


def bench(context: typer.Context) -> int:
    """Run a benchmark: floor, fanout, burst, restart, replay, memory, latency, append ..."""
    from fedsender_lab.bench import main

    return main(context.args)
