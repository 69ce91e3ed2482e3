"""The commands `repack` and `verify`, of `swiftlet-mlx` and of `swiftlet-repack` alike.

Knows options and the terminal; the work is in write.py, install.py and verify.py.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from swiftlet_mlx.cli import console
from swiftlet_mlx.cli.options import Quiet, example
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.errors import Cancelled, OptionError

REPACK_EXAMPLE = "Example: swiftlet-mlx repack --source Qwen3.6-35B-A3B-4bit --output qwen3.6-35b.qpack"
VERIFY_EXAMPLE = "Example: swiftlet-mlx verify qwen3.6-35b.qpack"

Source = Annotated[Path | None, typer.Option("--source", metavar="FOLDER", help="A local MLX checkpoint folder.")]
FromHf = Annotated[str | None, typer.Option("--from-hf", metavar="ORG/NAME", help="A repository on the hub.")]
FromUrl = Annotated[str | None, typer.Option("--from-url", metavar="URL", help="A folder on a web server.")]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of the hub repository.")
]


def repack(
    source: Source = None,
    from_hf: FromHf = None,
    from_url: FromUrl = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="NAME.qpack",
            help="The container to make. From a hub or URL, default: the models folder.",
        ),
    ] = None,
    revision: Revision = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan of an installation and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before downloading.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away an unfinished, different attempt.")] = False,
    streams: Annotated[int, typer.Option("--streams", min=1, max=16, metavar="N", help="Downloads at once.")] = 4,
    quiet: Quiet = False,
) -> None:
    """Make a container of a checkpoint, or install one from a hub.

    Interrupted, the same command continues.
    """
    _one_of(source, from_hf, from_url)
    if source is None:
        from .cli_install import install, source_of

        install(
            source_of(from_hf, from_url, revision), output, dry_run=dry_run, yes=yes, restart=restart, streams=streams,
            quiet=quiet,
        )  # fmt: skip
        return
    from swiftlet_mlx.locate import find_model

    from .write import repack_checkpoint

    if output is None:
        raise OptionError(f"--output is missing; for example --output {source.name}.qpack")
    for given, name in ((revision, "--revision"), (dry_run, "--dry-run")):
        if given:
            raise OptionError(f"{name} belongs to --from-hf and --from-url; a local --source has no such thing")
    try:
        with console.progress(quiet) as progress:
            made = repack_checkpoint(
                find_model(source), output, restart=restart, progress=progress,
                warn=(lambda text: None) if quiet else console.warn,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Cancelled("interrupted; repeat the same command to continue") from None
    if not quiet:
        console.say(f"{made} is complete. Chat with it: swiftlet-mlx chat {shlex.quote(str(made))}")


def verify(
    container: Annotated[str, typer.Argument(metavar="CONTAINER", help="A .qpack container, or an installed model.")],
    source: Source = None,
    from_hf: FromHf = None,
    from_url: FromUrl = None,
    revision: Revision = None,
    quiet: Quiet = False,
) -> None:
    """Check every byte of a container.

    Against its own hashes, and against its source if one is named.
    """
    from swiftlet_mlx.locate import find_model

    if from_hf is not None or from_url is not None:
        from .cli_install import check_source, source_of

        _one_of(source, from_hf, from_url)
        check_source(find_model(container), source_of(from_hf, from_url, revision), quiet=quiet)
        return

    from .verify import verify as check

    path = find_model(container)
    if _is_checkpoint(path):
        raise OptionError(
            f"{path} is a checkpoint; verify is for containers, which `swiftlet-mlx repack` makes of them"
        )
    with console.progress(quiet) as progress:
        found = check(path, find_model(source) if source is not None else None, progress=progress)
    if quiet:
        return
    if found.hashed_files:
        console.say(f"{found.hashed_files} files, {console.size(found.hashed_bytes)}: every byte as it was hashed")
        for name in found.unhashed:
            console.warn(f"{name} has no hash and was checked by size only")
    else:
        console.say("structure and sizes are right; the container has no hashes.json, so its bytes were not checked")
    if found.compared_bytes:
        console.say(f"{console.size(found.compared_bytes)} of tensors: equal to {source}, byte for byte")


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, and not a container that has lost its manifest."""
    return not any((path / name).exists() for name in ("manifest.json", "packed_experts"))


def _one_of(source: Path | None, from_hf: str | None, from_url: str | None) -> None:
    given = [
        name
        for name, value in (("--source", source), ("--from-hf", from_hf), ("--from-url", from_url))
        if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise OptionError(f"name one source: --source DIR, --from-hf ORG/NAME or --from-url URL (found {found})")


def main() -> NoReturn:
    """Console script `swiftlet-repack`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog=example(REPACK_EXAMPLE.replace("swiftlet-mlx repack", "swiftlet-repack")))(repack)
    sys.exit(run(app))
