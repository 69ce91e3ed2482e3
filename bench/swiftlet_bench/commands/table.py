"""`table`: the tables of results in README.md and on this page, made from the files of results."""

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
    """Print the newest results, and what studies have found on lent machines, as Markdown; or put them into a document,
    between its markers."""
    from swiftlet_bench import report, studies

    made = {"results": report.results_table(results), "studies": studies.tables(results)}
    if into is None:
        console.write("\n".join(part for part in made.values() if part))
        return
    old = new = into.read_text()
    shown = [name for name in made if report.BEGIN.format(name) in old]
    for name in shown or made:  # without any marker, what is missing is told
        new = report.put_between_markers(new, made[name], name)
    if check and new != old:
        raise report.ResultsError(
            f"{into}: its table is not that of {results}; run `python -m swiftlet_bench table --into {into}`"
        )
    if not check:
        into.write_text(new)
