"""`kvlift serve`: the reference worker behind HTTP."""

import asyncio
import concurrent.futures
import contextlib
import difflib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import attrs
import click
import msgspec
from click.core import ParameterSource

from kvlift.cli.finite import Finite
from kvlift.cli.output import fail, json_option, only_the_answer_on_stdout, say

if TYPE_CHECKING:
    from kvlift.runtime.worker.launch import Cluster
    from kvlift.runtime.worker.settings import WorkerSettings
    from kvlift.runtime.worker.tokenizer import TextCodec

SECRET_VARIABLE: Final = "KVLIFT_SECRET"
SECRET_BYTES_MIN: Final = 16
PAGES_MAX: Final = 1 << 24
LIVE_MAX: Final = 1 << 16
STORAGE_GIB_MAX: Final = 1 << 20
STORAGE_UNREAD: Final = (
    "without --host-pages storage is written and never read: pages come back through the host"
)
BACKLOG: Final = 512
LOOK_S: Final = 0.2
NAP_S: Final = 1.0
"""Nothing waits longer at a time: a signal that comes just before a wait is heard at its end."""
RESTART_PAUSE_S: Final = 2.0
PREFILL_RESTARTS_MAX: Final = 5
"""After so many deaths its requests fail with the reason, and what is wrong has to be looked at."""


def _settings(**options: Any) -> "WorkerSettings":
    """Raises a usage error for a combination that cannot work."""
    from kvlift.runtime.worker.settings import WorkerSettings

    fields = _fields(options.pop("config"))
    if options["role"] == "prefill":
        options["storage_folder"] = ""
    settings = WorkerSettings(driver=fields, **options)
    fault = settings.faults()
    if fault is not None:
        raise click.UsageError(fault)
    return settings


def _fields(entries: Sequence[str]) -> dict[str, object]:
    """`FIELD=VALUE` each. Raises a usage error for what no config has."""
    from kvlift.runtime.config import Config
    from kvlift.runtime.worker.rank_ports import WORKER_SIZES

    known = [each.name for each in attrs.fields(Config)]
    fields: dict[str, object] = {}
    for entry in entries:
        name, sign, value = entry.partition("=")
        if not sign:
            raise click.UsageError(f"--config takes FIELD=VALUE, not {entry!r}")
        if name not in known:
            mine = [each for each in known if each not in WORKER_SIZES]
            near = difflib.get_close_matches(name, mine, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(mine)}"
            raise click.UsageError(f"--config knows no field {name!r}; {hint}")
        fields[name] = value
    return fields


def _check_storage(folder: str) -> None:
    """Before the ranks are there, each of which would say the same."""
    from kvlift.core.policy import Switch
    from kvlift.effects.stores.folder import Folder, StoreRefusedError

    try:
        Folder(Path(folder)).create(Switch.OFF)
    except StoreRefusedError as error:
        fail(str(error))


def _secret(settings: "WorkerSettings") -> str:
    """The shared secret of the environment. It is needed where the wire leaves this machine."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret and len(secret.encode()) < SECRET_BYTES_MIN:
        fail(
            f"{SECRET_VARIABLE} has less than {SECRET_BYTES_MIN} bytes; "
            "make one with `openssl rand -hex 32`"
        )
    if not secret and settings.role != "both":
        fail(
            f"set {SECRET_VARIABLE} to one value for this worker and its peers: "
            "`openssl rand -hex 32` makes one"
        )
    return secret


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        # Its own text repeats the address.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror
        fail(f"cannot listen on {host}:{port} ({why}); choose another --host or --port")


@contextlib.contextmanager
def _running(settings: "WorkerSettings") -> "Iterator[Cluster]":
    """The cluster; what cannot start is one sentence and exit code 2."""
    from kvlift.runtime.worker.generation import EngineDownError
    from kvlift.runtime.worker.launch import Cluster, ClusterRefusedError
    from kvlift.runtime.worker.model_config import ModelRefusedError

    cluster = Cluster(settings, _secret(settings))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cluster)
        except (ClusterRefusedError, ModelRefusedError, EngineDownError) as error:
            fail(str(error))
        yield cluster


def _codec(settings: "WorkerSettings") -> "TextCodec":
    """Before the weights are loaded: a folder without a tokenizer is refused at once."""
    from kvlift.runtime.worker.loading import ModelSource
    from kvlift.runtime.worker.model_config import ModelRefusedError

    source = ModelSource(settings.model, settings.seed)
    try:
        source.config()
        return source.codec()
    except ModelRefusedError as error:
        fail(str(error))


async def _served(
    cluster: "Cluster",
    codec: "TextCodec",
    listening: socket.socket,
    address: str,
    tell_ready: Callable[[str], None],
) -> str:
    """Serve until the worker dies; the reason. Ends by cancellation otherwise."""
    import uvicorn

    from kvlift.runtime.worker.http import create_app
    from kvlift.runtime.worker.http_connections import (
        ACCEPTED_A_TURN_MAX,
        bounded_connections,
        connections_max,
    )
    from kvlift.runtime.worker.loading import ModelSource

    source = ModelSource(cluster.settings.model, cluster.settings.seed)
    app = create_app(cluster.engine, codec, source.config())
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=bounded_connections(connections_max()),
            backlog=ACCEPTED_A_TURN_MAX,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
    is_prefill = cluster.settings.role == "prefill"
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 - a field is all it tells
            await asyncio.sleep(0.01)
        listening.listen(BACKLOG)
        tell_ready(address)
        n_restarts = 0
        while not cluster.died.is_set() and not serving.done():
            await asyncio.sleep(LOOK_S)
            if (
                not is_prefill
                and cluster.prefill_died.is_set()
                and n_restarts < PREFILL_RESTARTS_MAX
            ):
                n_restarts += 1
                say(f"the prefill process has died; starting it again ({n_restarts})")
                await _restart_prefill(cluster)
        # Clients that wait are answered with the reason before the server ends.
        return cluster.fault or "the HTTP server has ended"
    finally:
        # Nobody is cut off without a word, and nothing keeps the server from ending.
        cluster.engine.end_all(cluster.fault or "the worker is being ended")
        server.should_exit = True
        await serving


async def _restart_prefill(cluster: "Cluster") -> None:
    """What keeps it from starting is told; the decode ranks live on, and it is tried again."""
    from zmq import ZMQError

    from kvlift.runtime.worker.generation import EngineDownError

    try:
        await asyncio.to_thread(cluster.restart_prefill)
    except (OSError, ZMQError, EngineDownError) as error:
        say(f"the prefill process could not be started: {error}")
        cluster.prefill_died.set()
        await asyncio.sleep(RESTART_PAUSE_S)


@click.command(
    epilog="Example: kvlift serve --model tiny --ranks 2 --storage ./kv --port 30000",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--role",
    type=click.Choice(["both", "prefill", "decode"]),
    default="both",
    help="`both` starts everything on this machine.",
)
@click.option("--ranks", "n_ranks", type=click.IntRange(1, 64), default=2, help="Decode ranks.")
@click.option("--model", default="tiny", help="A Hugging Face folder, or `tiny`.")
@click.option("--seed", type=int, default=0, help="Of the tiny model's weights.")
@click.option("--host", default="127.0.0.1", help="Address of the HTTP server.")
@click.option("--port", type=click.IntRange(0, 65535), default=30000, help="Its port; 0: any.")
@click.option("--page-tokens", type=click.IntRange(1, 4096), default=16, help="Tokens a page.")
@click.option(
    "--device-pages", type=click.IntRange(1, PAGES_MAX), default=512, help="KV pages on the device."
)
@click.option(
    "--host-pages", type=click.IntRange(0, PAGES_MAX), default=1024, help="KV pages on the host."
)
@click.option(
    "--storage",
    "storage_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the storage tier; left out: no storage.",
)
@click.option(
    "--storage-gib",
    type=Finite(0, STORAGE_GIB_MAX, min_open=True),
    default=4.0,
    help="The most that storage may hold.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="For the model.")
@click.option("--peer", "peers", multiple=True, help="Prefill node of a decode worker; repeatable.")
@click.option("--prefill-bind", default="", help="Where a prefill node listens, tcp://HOST:PORT.")
@click.option("--link-gbps", type=Finite(0, 1e6), default=0.0, help="Slow the link down.")
@click.option(
    "--max-running", "n_running_max", type=click.IntRange(1, LIVE_MAX), default=32, help="Batch."
)
@click.option(
    "--max-requests", "n_requests_max", type=click.IntRange(1, LIVE_MAX), default=256, help="Queue."
)
@click.option("--config", multiple=True, metavar="FIELD=VALUE", help="A field of kvlift's Config.")
@json_option
def serve(
    *,
    host: str,
    port: int,
    storage_folder: Path | None,
    storage_gib: float,
    peers: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Run the reference worker: SGLang's and OpenAI's HTTP routes over prefill and decode.

    Prints `ready http://...` on standard error when it answers; with --json, one JSON value with
    the addresses on standard output at that moment. A prefill node speaks HTTP (/health,
    /server_info) where --port is given. The secret that a prefill node and a decode worker share
    comes from the environment variable KVLIFT_SECRET.
    """
    folder = str(storage_folder.absolute()) if storage_folder else ""
    settings = _settings(
        storage_folder=folder,
        storage_bytes_max=int(storage_gib * (1 << 30)),
        peers=tuple(peers),
        **options,
    )
    asked = click.get_current_context().get_parameter_source("port")
    has_http = settings.role != "prefill" or asked is not ParameterSource.DEFAULT
    told_to = sys.stdout if as_json else None
    with only_the_answer_on_stdout(as_json=as_json), contextlib.ExitStack() as stack:
        listening = stack.enter_context(_listening(host, port)) if has_http else None
        codec = _codec(settings) if has_http else None
        if settings.storage_folder:
            _check_storage(settings.storage_folder)
            if not settings.host_pages:
                say("warning: " + STORAGE_UNREAD)
        cluster = stack.enter_context(_running(settings))
        reason = _until_the_end(cluster, codec, listening, host, told_to)
    click.echo(f"kvlift: {reason}", err=True)
    raise click.exceptions.Exit(1)


def _until_the_end(
    cluster: "Cluster",
    codec: "TextCodec | None",
    listening: socket.socket | None,
    host: str,
    told_to: TextIO | None,
) -> str:
    """Why the worker has ended by itself; Ctrl-C goes through as `KeyboardInterrupt`."""
    settings = cluster.settings
    prefill = settings.prefill_bind if settings.role == "prefill" else None

    def tell_ready(http: str | None) -> None:
        say(f"ready {' '.join(filter(None, (prefill, http)))}")
        if told_to is not None:
            answer = {"role": settings.role, "http": http, "prefill": prefill, "pid": os.getpid()}
            click.echo(msgspec.json.encode(answer), file=told_to)

    if listening is None or codec is None:
        tell_ready(None)
        while not cluster.died.wait(NAP_S):
            pass
        return cluster.fault
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    serving = cluster.start(_served(cluster, codec, listening, address, tell_ready))
    try:
        while not concurrent.futures.wait([serving], NAP_S).done:
            pass
        return serving.result()
    except BaseException:
        serving.cancel()
        raise
