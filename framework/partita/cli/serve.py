"""`partita serve`: an HTTP server with the model of a file or a run."""

from typing import Annotated

import typer

from partita.cli.loading import open_model
from partita.cli.options import AnswerOverrides, BatchSize, Context, FilesOrRun, LogJson, Quiet, TrustRemoteCode
from partita.serving.address import check_address
from partita.serving.limits import MAX_WAITING, ServerLimits


def serve(
    sources: FilesOrRun,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than 127.0.0.1, clients need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model for clients. Default: that of the file or run.", show_default=False),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve a page for chatting in a browser, at /.")] = False,
    token: Annotated[
        bool, typer.Option("--token", help="Require a token on 127.0.0.1 too: PARTITA_TOKEN, or a new one.")
    ] = False,
    context: Context = None,
    batch_size: BatchSize = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum number of waiting requests; more get status 429.")
    ] = MAX_WAITING,
    max_body: Annotated[
        int, typer.Option(min=1024, help="Maximum size of a request in bytes.")
    ] = ServerLimits.body_bytes,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Maximum time of an answer in seconds.")] = (
        ServerLimits.answer_seconds
    ),
    finish_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to finish accepted requests after SIGTERM or Ctrl-C.")
    ] = ServerLimits.finish_seconds,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    log_json: LogJson = False,
) -> None:
    """Serve the model over HTTP: the OpenAI API, and /predict for rows."""
    check_address(host, port)  # before libraries are loaded, which takes seconds
    model = open_model(sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code, one_process=True)
    model.serve(
        host,
        port,
        name=name,
        ui=ui,
        token=token,
        context=context,
        batch_size=batch_size,
        max_waiting=max_waiting,
        max_body=max_body,
        max_seconds=max_seconds,
        finish_seconds=finish_seconds,
        say=lambda line: print(line, flush=True),
    )
