"""rectgrad app"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from rectgrad.cli import CommandExit
from rectgrad.cli import options as shared

app_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app_app.command("app")
def app(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of photos to browse; default: photos are uploaded on the page."),
    ] = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 127.0.0.1 is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on; default: the first free one from 7860."),
    ] = None,
    auth: Annotated[
        Path | None,
        typer.Option(
            help="File that contains the user:password to require; default: RECTGRAD_AUTH in the environment."
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Another host name to accept, such as that of a proxy; can be repeated."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow access from other machines without a password.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Start the explorer: a web page that shows what the network looked at in your photos.

    Example: rectgrad app photos/ --model efficientnet_lite0
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the explorer needs {' and '.join(missing)}: pip install 'rectgrad[app]'")
    from rectgrad.app import server

    login = server.check_access(host, auth, insecure)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    opened = server.listen(host, port)
    with opened:
        network = shared.network(model, weights, labels, device, None)
        shared.check_alone(network.model, network.device)
        signal.signal(signal.SIGTERM, _terminate)  # runs the cleanup below
        temporary = server.TemporaryFolder()
        ended = True
        try:
            from rectgrad.app.folder import Folder
            from rectgrad.app.guard import Guard
            from rectgrad.app.routes import Explorer, create
            from rectgrad.app.service import Service

            given = {"weights": weights and weights.absolute(), "labels": labels and labels.absolute()}
            service = Service(network.model, network.device, _absolute(model), **given)
            browsed = None if folder is None else Folder(folder, service)
            explorer = Explorer(service, temporary, browsed)
            if browsed is not None:
                browsed.start()
            temporary.start()
            names = server.accepted_names(host, name or [])
            guarded = Guard(create(explorer), names, host not in server.LOCAL, login)
            try:
                server.serve(guarded, opened, server.url_of(opened, host), browser, proxied=bool(name))
            finally:
                ended = explorer.close()
        finally:
            temporary.close()
            if not ended:  # a computation that cannot be stopped must not keep the process alive
                os._exit(0)


def _terminate(*_: object) -> None:
    raise CommandExit(0)


def _absolute(model: str) -> str:
    """The name of a model; the path of a user's file is made absolute."""
    path, _, factory = model.rpartition(":")
    return f"{Path(path).absolute()}:{factory}" if Path(path).is_file() else model
