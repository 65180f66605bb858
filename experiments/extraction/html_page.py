"""The page of a report: one HTML file that needs no other, and no network.

report_html/ holds its template, its style and its script. Whatever comes from a corpus
is in the page as JSON, and the script puts it there as text; a policy lets the browser
run this script and no other.
"""

import base64
import hashlib
import html
import json
import pathlib
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from experiments.extraction import queries, report_page, tables
from experiments.extraction.gallery import Gallery
from experiments.extraction.memorized_sets import MemorizedSets
from experiments.extraction.report_figure import Finding, Findings
from experiments.extraction.report_page import TABLE_1_TITLE
from experiments.extraction.sweep_runs import SweepRuns

_FOLDER = pathlib.Path(__file__).parent / "report_html"


def write_page(
    runs: SweepRuns,
    found: Findings,
    fits: pl.DataFrame,
    sets: MemorizedSets,
    gallery: Gallery,
    pictures: Mapping[str, bytes],
    seed: int,
) -> str:
    """The report in HTML, in ASCII.

    Args:
      runs: The sweeps.
      found: What the figures show.
      fits: As `tables.fits` has them.
      sets: Table 1; left out if there is none to show.
      gallery: The windows to browse.
      pictures: PNG, by the name of the figure.
      seed: Of the resamples.
    """
    style, script = (_read(name) for name in ("page.css", "page.js"))
    figures = [
        _figure(finding, pictures[finding.figure.name]) for finding in found.figures
    ]
    return string.Template(_read("template.html")).substitute(
        style=style,
        style_hash=_policy_hash(style),
        script=script,
        script_hash=_policy_hash(script),
        data=embedded_json(gallery.data),
        measured=_measured(runs),
        models=_table(tables.cells(report_page.models_table(runs))),
        figures="\n".join(figures),
        fits=_table(tables.cells(fits)),
        sets=_sets(sets, runs),
        choice=_paragraphs(gallery.notes),
        method=_list(report_page.method(runs, seed)),
        notes=_list(report_page.left_out(runs, found, sets)),
    )


def embedded_json(data: Any) -> str:
    """JSON that no parser of HTML takes for markup, whatever the texts in it.

    Example:
      >>> embedded_json("</script>")
      '"\\\\u003c/script>"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # In JSON, "<" occurs in strings alone.
    return text.replace("<", "\\u003c")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="ascii")


def _policy_hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style in the page."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _escape(text: str) -> str:
    escaped = html.escape(text, quote=True)
    # A page that is ASCII reads the same in every encoding. Names of folders may hold
    # bytes that are no text.
    plain = escaped.encode("utf-8", "replace").decode()
    return plain.encode("ascii", "xmlcharrefreplace").decode()


def _inline(markdown: str) -> str:
    """The two marks of Markdown that captions and notes use, and all else as text."""
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", _escape(markdown), flags=re.DOTALL)
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", text, flags=re.DOTALL)


def _figure(finding: Finding, picture: bytes) -> str:
    title = _escape(finding.figure.title)
    caption = _inline(finding.caption)
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return (
        f'<figure>\n<img src="{source}" alt="{title}">\n'
        f"<figcaption><b>{title}.</b> {caption}</figcaption>\n</figure>"
    )


def _sets(sets: MemorizedSets, runs: SweepRuns) -> str:
    if sets.cell is None:
        return ""
    table = _table(tables.set_matrix(*sets.shown()))
    caption = _inline(report_page.table_1_caption(sets, runs))
    return f"<h2>{_escape(TABLE_1_TITLE)}</h2>\n<p>{caption}</p>\n{table}"


def _measured(runs: SweepRuns) -> str:
    folders = [f"`{sweep.folder}`" for sweep in runs.sweeps]
    prompts = runs.records.select("window_id", "context").unique()
    windows = runs.records["window_id"].n_unique()
    return _paragraphs(
        [
            f"{len(runs.models)} models, {windows:,} windows, {len(prompts):,} prompts "
            f"(windows at one context). {report_page.asked(runs)} Precision "
            f"of matrix products: `{runs.precision}`. Near-ties are margins within "
            f"{queries.NEAR_TIE:g} of 0.",
            f"Windows: `{runs.windows}` (sha256 `{runs.windows_sha256[:16]}`). "
            f"Sweeps: {', '.join(folders)}.",
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = (list(map(_escape, row)) for row in rows)
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    lines = [
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td>{cell}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    ]
    return (
        '<div class="wide" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{_inline(text)}</p>" for text in texts)


def _list(texts: Sequence[str]) -> str:
    items = "\n".join(f"<li>{_inline(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>"
