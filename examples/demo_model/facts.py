"""The table of countries, as data.

Knows the file `countries.txt` and what a row means. Does not know how questions are phrased.
Invariant: every country has a capital, a continent, at least one language and a currency.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ATTRIBUTES = ("capital", "continent", "language", "currency")


@dataclass(frozen=True, slots=True)
class Country:
    """One row: `name` as a sentence says it ("the Netherlands"), `aliases` without articles."""

    name: str
    capital: str
    continent: str
    languages: tuple[str, ...]
    currency: str
    aliases: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (self.name and self.capital and self.continent and self.currency and all(self.languages)):
            raise ValueError(f"countries.txt: {self.name!r}: a column is empty; fill in all of the first five")

    @property
    def bare(self) -> str:
        """The name without its article: "Netherlands"."""
        return self.name.removeprefix("the ")

    def value(self, attribute: str) -> str:
        """The text that a right answer about `attribute` must contain."""
        return {
            "capital": self.capital,
            "continent": self.continent,
            "language": self.languages[0],
            "currency": self.currency.removeprefix("the "),
        }[attribute]

    def sentence(self, attribute: str) -> str:
        """The answer to a question about `attribute`, one true sentence."""
        if attribute == "capital":
            return f"The capital of {self.name} is {self.capital.rstrip('.')}."
        if attribute == "continent":
            return f"{_capitalise(self.name)} {_verb(self)} in {self.continent}."
        if attribute == "currency":
            return f"The currency of {self.name} is {self.currency}."
        if len(self.languages) == 1:
            return f"The main language of {self.name} is {self.languages[0]}."
        spoken = ", ".join(self.languages[:-1]) + " and " + self.languages[-1]
        return f"The main languages of {self.name} are {spoken}."


def _capitalise(name: str) -> str:
    return name[0].upper() + name[1:]


def _verb(country: Country) -> str:
    plural = (
        "the Bahamas",
        "the Comoros",
        "the Maldives",
        "the Marshall Islands",
        "the Netherlands",
        "the Philippines",
    )
    return "are" if country.name in (*plural, "the Seychelles", "the Solomon Islands") else "is"


def load_countries(path: Path | None = None) -> tuple[Country, ...]:
    """Reads the table.

    Args:
        path: the table; by default `countries.txt` beside this file.

    Returns:
        The countries in the order of the file.

    Raises:
        ValueError: a line does not have six columns, or a column is empty.
    """
    path = path or Path(__file__).with_name("countries.txt")
    countries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = [column.strip() for column in line.split("|")]
        if len(columns) != 6:
            raise ValueError(f"{path.name}:{number}: found {len(columns)} columns, need 6 separated by '|'")
        name, capital, continent, languages, currency, aliases = columns
        countries.append(
            Country(
                name,
                capital,
                continent,
                tuple(language.strip() for language in languages.split(",")),
                currency,
                tuple(alias.strip() for alias in aliases.split(",") if alias.strip()),
            )
        )
    return tuple(countries)
