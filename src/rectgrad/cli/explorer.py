"""rectgrad app"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from rectgrad.cli import options as shared

app_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app_app.command("app")
def app(
    folder: Annotated[Path | None, typer.Argument(help="Photos to browse; none: drop your own.")] = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    host: Annotated[str, typer.Option(help="127.0.0.1: this machine alone.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="None: the first free one from 7860 on.")] = None,
    auth: Annotated[str | None, typer.Option(help="user:password, asked of everybody.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let everybody in who can reach it.")] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """The explorer: a page on which you drop a photo and see what the network looked at.

    Example: rectgrad app photos/ --model efficientnet_lite0
    """
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the explorer needs gradio: pip install 'rectgrad[app]'")
    from rectgrad.app import server

    login = server.check_open(host, auth, insecure)
    server.check_place(host, port)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    network = shared.network(model, weights, labels, device, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what is temporary goes then too
    temporary = server.Temporary()  # before gradio is imported
    try:
        from rectgrad.app.desk import Desk
        from rectgrad.app.folder import Folder
        from rectgrad.app.page import Page

        desk = Desk(network.model, network.device, weights=weights, labels=labels)
        browsed = None if folder is None else Folder(folder, desk)
        page = Page(desk, browsed)
        if browsed is not None:
            browsed.start()
        _, url, _ = server.launch(
            page, temporary, host, port, auth=login, inbrowser=browser, prevent_thread_lock=True
        )
        print(f"rectgrad: {url}  (Ctrl-C ends it)", flush=True)
        page.blocks.block_thread()
    finally:
        temporary.close()
