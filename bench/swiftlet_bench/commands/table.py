"""`table`: the README's table of results, made from the files of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console

EXAMPLE = "Example: python -m swiftlet_bench table --results bench/results"


def table(
    results: Annotated[Path, typer.Option("--results", help="Folder with the files of results.")] = Path(
        "bench/results"
    ),
    into: Annotated[
        Path | None, typer.Option("--into", metavar="README.md", help="Put it between the markers of this document.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if the document differs.")] = False,
) -> None:
    """Print the table of the newest results as Markdown, or put it into a document."""
    from swiftlet_bench import report

    made = report.results_table(results)
    if into is None:
        console.write(made)
        return
    old = into.read_text()
    new = report.put_between_markers(old, made)
    if check and new != old:
        raise report.ResultsError(
            f"{into}: its table is not that of {results}; run `python -m swiftlet_bench table --into {into}`"
        )
    if not check:
        into.write_text(new)
