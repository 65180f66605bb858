"""What a figure of a report is made of; figure_list.py has all of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import matplotlib.figure
import polars as pl

from experiments.extraction.sweep_runs import SweepRuns
from experiments.extraction.trends import Series

Shown = TypeVar("Shown")


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a user may choose.

    Attributes:
      seed: Of the resamples.
      figure_5_bucket: Bucket of Figure 5; None takes the one with most windows.
    """

    seed: int = 0
    figure_5_bucket: int | None = None


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Why a figure that a reader would miss is not there.

    Attributes:
      reason: Ends the sentence "TITLE: not drawn, as ...".
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Figure(Generic[Shown]):
    """One figure of a report, with its tables.

    Attributes:
      name: Stem of its files: NAME.png, tables/NAME.csv and tables/NAME.md.
      title: Its heading.
      measure: What it shows of the sweeps. None leaves it out in silence, where the
        sweeps are about something else; `LeftOut` leaves a note.
      caption: What it shows, in sentences that a reader can check; Markdown of which
        only `code` and *emphasis* are used.
      draw: The picture.
      table: Every number in it, in full precision; `tables.markdown` has how people
        see it.
      further_tables: More tables by a suffix of their names: tables/NAME_SUFFIX.csv.
      fitted: The series whose log-linear fits belong in tables/fits.csv.
    """

    name: str
    title: str
    measure: Callable[[SweepRuns, Choices], Shown | LeftOut | None]
    caption: Callable[[Shown, SweepRuns], str]
    draw: Callable[[Shown], matplotlib.figure.Figure]
    table: Callable[[Shown], pl.DataFrame]
    further_tables: Mapping[str, Callable[[Shown], pl.DataFrame]] = dataclasses.field(
        default_factory=dict
    )
    fitted: Callable[[Shown], Sequence[Series]] = lambda shown: ()

    def table_names(self) -> list[str]:
        """Stems of all its tables, the main one first."""
        return [self.name, *(f"{self.name}_{suffix}" for suffix in self.further_tables)]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A figure and what it shows of some sweeps."""

    figure: Figure[Any]
    shown: Any
    runs: SweepRuns

    @property
    def caption(self) -> str:
        """What the figure shows, in words."""
        return self.figure.caption(self.shown, self.runs)

    @property
    def series(self) -> Sequence[Series]:
        """The series with log-linear fits."""
        return self.figure.fitted(self.shown)

    def draw(self) -> matplotlib.figure.Figure:
        """The picture."""
        return self.figure.draw(self.shown)

    def tables(self) -> dict[str, pl.DataFrame]:
        """All its tables by their stems, the main one first."""
        makers = [self.figure.table, *self.figure.further_tables.values()]
        names = self.figure.table_names()
        return {n: make(self.shown) for n, make in zip(names, makers, strict=True)}


@dataclasses.dataclass(frozen=True)
class Findings:
    """What all figures show.

    Attributes:
      figures: Those that are drawn.
      notes: A sentence on each that a reader may miss.
    """

    figures: tuple[Finding, ...]
    notes: tuple[str, ...]
