"""The tables of a report: every number for machines, the main ones for people.

CSV holds fractions and slopes per tenfold as they were computed; Markdown holds
percentages, percentage points and intervals.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from experiments.extraction.cluster_statistics import LogLinearFit, NoFit
from experiments.extraction.estimates import Estimate
from experiments.extraction.trends import Point, Series, Trend


def by_parameters(trend: Trend) -> pl.DataFrame:
    """Figure 1a: a row for each model."""
    return _rows(
        trend,
        lambda series, point: {
            "model": point.label,
            "baseline": series.baseline,
            "params": int(point.x),
        },
    )


def by_repetitions(trend: Trend) -> pl.DataFrame:
    """Figure 1b: a row for each model and bucket."""
    places = trend.buckets.to_dicts()
    by_middle = {place["repetitions"]: place for place in places}
    return _rows(trend, lambda series, point: _model(series) | by_middle[point.x])


def by_context(trend: Trend) -> pl.DataFrame:
    """Figure 1c: a row for each model and context."""
    return _rows(
        trend, lambda series, point: {**_model(series), "context": int(point.x)}
    )


def by_length(trend: Trend) -> pl.DataFrame:
    """Figure 2b: a row for each model and length."""
    return _rows(
        trend, lambda series, point: {**_model(series), "length": int(point.x)}
    )


def by_length_and_context(trend: Trend) -> pl.DataFrame:
    """Figure 5: a row for each length and context."""
    return _rows(
        trend,
        lambda series, point: {
            "model": point.label,
            **trend.buckets.drop("repetitions").row(0, named=True),
            "length": int(series.name),
            "context": int(point.x),
        },
        lambda point: _columns("tokens_correct", point.tokens_correct),
    )


def fits(series: Mapping[str, Sequence[Series]]) -> pl.DataFrame:
    """The log-linear fits of all figures; `note` says why a number is missing.

    Args:
      series: By the figure's name.
    """
    rows = [
        {"figure": figure, "series": s.name, "baseline": s.baseline, **_fit(s)}
        for figure, lines in series.items()
        for s in lines
        if s.fit is not None
    ]
    return pl.DataFrame(rows, schema=_FITS)


_FITS: dict[str, Any] = {
    "figure": pl.String(),
    "series": pl.String(),
    "baseline": pl.Boolean(),
    "points": pl.Int64(),
    "slope": pl.Float64(),
    "slope_lower": pl.Float64(),
    "slope_upper": pl.Float64(),
    "intercept": pl.Float64(),
    "r_squared": pl.Float64(),
    "note": pl.String(),
}


def markdown(table: pl.DataFrame) -> str:
    """The table for people, as `cells` has it.

    Example:
      >>> row = {"model": "a", "extracted": 0.5, "extracted_lower": 0.25}
      >>> print(markdown(pl.DataFrame([row | {"extracted_upper": 0.75}])), end="")
      | model | extracted              |
      |-------|------------------------|
      | a     | 50.00 % [25.00, 75.00] |
    """
    return markdown_of(cells(table))


def cells(table: pl.DataFrame) -> list[list[str]]:
    """The text of a table, the header first: intervals in percent.

    The columns NAME, NAME_lower and NAME_upper become one, and a column of which
    nothing is known is left out.
    """
    names = [
        name
        for name in table.columns
        if not name.endswith(("_lower", "_upper"))
        and name not in _CSV_ONLY
        and not table[name].is_null().all()
    ]
    header = [_HEADERS.get(name, name.replace("_", " ")) for name in names]
    return [header, *([_cell(row, name) for name in names] for row in table.to_dicts())]


def set_matrix(totals: pl.DataFrame, pairs: pl.DataFrame) -> list[list[str]]:
    """Table 1 of Carlini et al. 2023: the text of each cell, the header first.

    Args:
      totals: As `memorized_sets.totals` has them, of one length and context.
      pairs: As `memorized_sets.pairs` has them, of the same.
    """
    summary = totals.select("model", "params", "memorized", "only", "only_strict")
    differences = {
        (model, other): f"{count:,}"
        for model, other, count in pairs.select(
            "model", "other", "not_by_other"
        ).iter_rows()
    }
    models = totals["model"].to_list()
    header, *rows = cells(summary)
    matrix = [
        [differences.get((model, other), "-") for other in models] for model in models
    ]
    return [
        header + [f"not by {model}" for model in models],
        *(row + counts for row, counts in zip(rows, matrix, strict=True)),
    ]


def markdown_of(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the header first, as a table of Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in escaped]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


# What a line would be at x = 1 is of use to draw it, and means nothing.
_CSV_ONLY = ("intercept",)
_HEADERS = {
    "params": "parameters",
    "slope": "slope, pp per tenfold",
    "r_squared": "R²",
    "tokens_correct": "right tokens",
    "near_ties": "near-ties",
    "memorized": "memorised",
    "only": "by it alone",
    "only_strict": "the same, strictly",
    "difference": "difference, pp",
    "lengths_deviation": "deviation of lengths",
    "lengths_least": "least of lengths",
    "lengths_most": "most of lengths",
    "gain": "gain, pp",
    "mean_gain": "mean gain, pp",
    "largest_gain": "largest gain, pp",
}


# What is no share of windows, by the format of its numbers.
_FORMATS = {
    "r_squared": ".3f",
    "repetitions": ".4g",
    "entropy": ".2f",
    "entropy_low": ".2f",
    "entropy_high": ".2f",
    "pooled_z": "+.2f",
    "clustered_z": "+.2f",
}
# In points, with a sign.
_DIFFERENCES = ("slope", "difference", "gain", "mean_gain", "largest_gain")


def p_value(p: float) -> str:
    """A p-value with its sign of comparison.

    Example:
      >>> p_value(0.0312), p_value(1e-20), p_value(0.0)
      ('= 0.031', '= 1e-20', '< 1e-300')
    """
    # Below it, float64 has no more digits, and then none at all.
    return f"= {p:.2g}" if p >= 1e-300 else "< 1e-300"


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if name in _FORMATS:
        return format(value, _FORMATS[name])
    if name.endswith("_p"):
        return p_value(value).removeprefix("= ")
    sign = "+" if name in _DIFFERENCES else ""
    text = f"{100 * value:{sign}.2f}"
    lower, upper = row.get(f"{name}_lower"), row.get(f"{name}_upper")
    if lower is None or upper is None:
        return text if sign else f"{text} %"
    ends = f"[{100 * lower:{sign}.2f}, {100 * upper:{sign}.2f}]"
    return f"{text} {ends}" if sign else f"{text} % {ends}"


def _rows(
    trend: Trend,
    key: Callable[[Series, Point], dict[str, Any]],
    more: Callable[[Point], dict[str, Any]] = lambda point: {},
) -> pl.DataFrame:
    rows = [
        {
            **key(series, point),
            **_columns("extracted", point.extracted),
            **more(point),
            "windows": point.windows,
            "clusters": point.clusters,
        }
        for series in trend.series
        for point in series.points
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def _model(series: Series) -> dict[str, Any]:
    return {
        "model": series.name,
        "baseline": series.baseline,
        "params": series.params,
    }


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    value, lower, upper = (
        (estimate.value, estimate.lower, estimate.upper) if estimate else (None,) * 3
    )
    return {name: value, f"{name}_lower": lower, f"{name}_upper": upper}


def _fit(series: Series) -> dict[str, Any]:
    points = {"points": len(series.points)}
    if isinstance(series.fit, NoFit):
        return {**points, "note": f"no fit: {series.fit.reason}"}
    assert isinstance(series.fit, LogLinearFit)
    lower, upper = series.fit.slope_interval or (None, None)
    notes = []
    if series.fit.num_points == 2:
        notes.append("a line through two points explains them whatever they are")
    if series.fit.slope_interval is None:
        notes.append("no interval: resampling says nothing")
    return {
        **points,
        "slope": series.fit.slope,
        "slope_lower": lower,
        "slope_upper": upper,
        "intercept": series.fit.intercept,
        "r_squared": series.fit.r_squared,
        "note": "; ".join(notes),
    }
