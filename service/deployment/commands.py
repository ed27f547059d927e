"""Commands for operators: `fetch` downloads bundles, `key` makes API keys, `upgrade` replaces the Ray cluster of a RayService."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from service.terminal import command_app, console, needing

app = command_app()
PROGRESS_EVERY_S = 5.0  # seconds between two progress lines in a log


@app.command()
def fetch(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            envvar="BUNDLE_URLS",
            help="[NAME=]URL[#sha256:FINGERPRINT] of a bundle's folder: s3://, gs://, az://, https://, http://, file:// or a path.",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option(help="Folder; each bundle becomes a folder in it.", show_default=False)],
    max_gib: Annotated[float, typer.Option(min=0.001, help="Largest bundle.")] = 20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte before a transfer is retried.")] = 30,
    redirect_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVER",
            envvar="BUNDLE_REDIRECT_TO",
            help="Another server to which a web server may redirect, such as https://cdn.example. Repeat it for several.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Download bundles from an object store, a web server or a volume. A bundle appears in the folder once all its hashes are verified.

    Files that already exist are not fetched again, and an interrupted transfer is continued. Credentials come from the environment
    (`AWS_*`, `GOOGLE_*`, `AZURE_*`, roles of pods and machines). `AWS_ENDPOINT_URL` sets the address of another S3 server.
    """
    from service.deployment import fetching

    with needing("fetch"), transfer_bar() as (show, say):
        bounds = fetching.Bounds(int(max_gib * 2**30), timeout, redirect_to=tuple(redirect_to or ()))
        for each in fetching.fetch(urls, to, bounds, show, say):
            megabytes = each.received_bytes / 1e6
            rate = f"{megabytes:,.1f} MB in {each.seconds:.1f} s, {megabytes / max(each.seconds, 1e-3):,.1f} MB/s"
            how = rate if each.received_bytes else "already there"
            say(f"{each.folder}: {how}, fingerprint {each.manifest.fingerprint}")
            if not each.pinned:
                say(f"  not pinned: add #sha256:{each.manifest.fingerprint} to the URL to refuse any other bundle")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="What logs and traces call it.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="The key's tenant. Limits, shares and usage belong to the tenant.", show_default=False)],
    file: Annotated[Path | None, typer.Option(help="Put the entry into this file of keys; it is made if there is none.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Limit of the tenant on each gateway.", show_default="none")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="The same of tokens read and written.", show_default="none")] = None,
    streams: Annotated[int | None, typer.Option(help="Streams at the same time.", show_default="none")] = None,
) -> None:
    """Make an API key. It is printed only once, with its entry for `--api-keys-file`, which contains the key's hash."""
    from service.http import keys

    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute, "streams": streams}
    made, entry = keys.make(name, tenant, limits)
    if file is not None:
        keys.add(entry, file)
    print(made)
    if file is None:
        print(keys.entry_json(entry))
        console.print("The first line is the key: it is not shown again. The second goes into the list in the file of keys.")


@app.command()
def upgrade(
    kustomize: Annotated[Path | None, typer.Option("--kustomize", "-k", help="Kustomize overlay.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Manifests, as of `helm template`.", show_default=False)] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the RayService.")] = "attnserve",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the new cluster must be ready.")] = 1800,
) -> None:
    """Apply manifests with a RayService, so that its new Ray cluster starts as large as the running one. Needs `kubectl`.

    Without this command the new cluster has the smallest size, and gets all traffic at once. To roll back, give the old manifests.
    """
    from service.deployment import upgrading

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    upgrading.upgrade(upgrading.rendered(kustomize, file), namespace, timeout, say)


@contextmanager
def transfer_bar() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """Yield (show, say): `show(name, bytes so far, bytes in all)` updates a progress bar, and `say(line)` prints a line above the bar. If
    stderr is not a terminal, as in a pod, `show` prints a line every few seconds."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    told: dict[str, tuple[float, int]] = {}

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total, completed=done)
            progress.update(tasks[name], completed=done)
            now, (before_s, before) = time.monotonic(), told.setdefault(name, (time.monotonic(), done))
            if not console.is_terminal and now - before_s >= PROGRESS_EVERY_S:
                told[name] = (now, done)
                say(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {(done - before) / 1e6 / (now - before_s):,.1f} MB/s")

        yield show, say
