"""The text of a report: what was measured, the figures, and what was left out."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import polars as pl

from experiments.extraction import cluster_statistics, queries, tables
from experiments.extraction.dataset_config import UNIFORM
from experiments.extraction.memorized_sets import MemorizedSets
from experiments.extraction.report_figure import Finding, Findings
from experiments.extraction.sweep_runs import SweepRuns

TABLE_1, TABLE_1_MODELS = "table_1", "table_1_models"
TABLE_1_TITLE = "Table 1: memorised by one model and not by another"
TABLES = "tables"
HTML = "report.html"

_CONTINUED = """\
*Extractable*: greedy decoding from the prompt, which is the tokens before the suffix
in the sampled occurrence, gives exactly the {suffix_length} tokens of the suffix.
All figures but 5 prompt with all of the window but its suffix. *Right tokens* are the
model's first choice given the true tokens before them."""
_FILLED = """\
*Extractable*: with 15 % of a window's tokens dropped (masking {masking}), the model's
first choice is right for every token that fills them in, given the true ones before it
in the targets. *Right tokens* are those of the targets for which it is right."""
_METHOD = (
    """\
*Clusters*: windows that lie in one repeated passage are extracted together or not at
all, so that passages, and not windows, count as independent.""",
    """\
*Intervals of fractions* are Wilson's at 95 %, with the number of independent windows
that would be as telling as these clusters.""",
    """\
*Fits* are ordinary least squares of the fraction on log10 of what the figure varies;
pp are percentage points. The interval of a slope comes from {resamples:,} refits to
resampled clusters (seed {seed}), drawn once for all points, so that windows that two
models share stay shared. It is too narrow where only a handful of clusters have
anything extracted.""",
    """\
*Ties* are windows of which a token to predict shares the top logit; *near-ties* those
of which the least margin (logit of the true token less the best other) is within
{near_tie:g} of 0, where rounding may turn the verdict.""",
)


def write_page(
    runs: SweepRuns,
    found: Findings,
    fits: pl.DataFrame,
    sets: MemorizedSets,
    seed: int,
) -> str:
    """The report in Markdown.

    Args:
      runs: The sweeps.
      found: What the figures show.
      fits: As `tables.fits` has them.
      sets: Table 1; left out if there is none to show.
      seed: Of the resamples.
    """
    browse = f"To browse the windows, open [{HTML}]({HTML})."
    sections = [f"# How much was memorised\n\n{browse}\n\n{_measured(runs)}"]
    sections += [_figure_section(finding) for finding in found.figures]
    fits_link = f"[CSV]({TABLES}/fits.csv)"
    sections.append(f"## Log-linear fits\n\n{tables.markdown(fits)}\n{fits_link}\n")
    if sets.cell is not None:
        sections.append(_table_1_section(sets, runs))
    notes = "".join(f"- {note}\n" for note in left_out(runs, found, sets))
    sections.append(f"## Notes on what was left out\n\n{notes}")
    method_notes = "".join(
        f"- {note}\n".replace("\n", "\n  ").rstrip(" ") for note in method(runs, seed)
    )
    sections.append(
        "## How to read the numbers\n\nFigures have the numbers of Carlini et al. 2023 "
        f"(arXiv 2202.07646).\n\n{method_notes}"
    )
    return "\n".join(sections)


def method(runs: SweepRuns, seed: int) -> list[str]:
    """How to read the numbers, a note each."""
    return [
        note.format(
            suffix_length=runs.suffix_length,
            masking=runs.masking,
            resamples=cluster_statistics.NUM_RESAMPLES,
            seed=seed,
            near_tie=queries.NEAR_TIE,
        )
        for note in (_FILLED if runs.masking else _CONTINUED, *_METHOD)
    ]


def asked(runs: SweepRuns) -> str:
    """What models were asked to reproduce, in a sentence."""
    if runs.masking:
        return f"15 % of each window's tokens are dropped (masking `{runs.masking}`)."
    return f"Suffix: {runs.suffix_length} tokens."


def models_table(runs: SweepRuns) -> pl.DataFrame:
    """The models, and how many of their verdicts are close calls."""
    models = pl.DataFrame(
        {
            "model": [model.name for model in runs.models],
            "baseline": [model.baseline for model in runs.models],
            "params": [model.params for model in runs.models],
            "folder": [model.folder for model in runs.models],
        }
    )
    verdicts = queries.verdicts_per_model(runs.records)
    verdicts = verdicts.with_columns(pl.col("model").cast(pl.String))
    return models.join(verdicts, on="model", maintain_order="left")


def table_1_caption(sets: MemorizedSets, runs: SweepRuns) -> str:
    """What the shown part of Table 1 is about, in words."""
    assert sets.cell is not None
    length, context = sets.cell
    totals, _ = sets.shown()
    asked_for = (
        f"of which {length - context} were dropped"
        if runs.masking
        else f"prompted by their first {context}"
    )
    caption = (
        f"Of {totals['windows'][0]:,} windows of {length} tokens, {asked_for} and "
        "given to every model: how many the model of a row memorised, and how many of "
        "these the model of a column did not."
    )
    alone = totals.drop_nulls("only").sort("params", maintain_order=True)
    if alone.is_empty():
        return caption
    # Of models of one size, the one that the table has first, or last.
    ends = {"smallest": alone.row(0, named=True), "largest": alone.row(-1, named=True)}
    caption += (
        " *By it alone* is by no other model trained on the corpus; "
        f"{_counts(ends, 'only')}."
    )
    if runs.masking:
        return caption
    if alone["only_strict"].has_nulls():
        return f"{caption} {PLAIN_RULE}"
    return (
        f"{caption} *Strictly*, what each of the others generates also occurs nowhere "
        f"in the corpus after the prompt; {_counts(ends, 'only_strict')}."
    )


PLAIN_RULE = (
    "Whether what the others generate occurs elsewhere in the corpus is not known of "
    "each of them, so this is the plain rule; for the paper's stricter one, by which "
    "it must not, sweep with --config.decode=True and --config.corpus=tokens:DIR."
)


def _counts(ends: dict[str, dict[str, Any]], column: str) -> str:
    return "; ".join(
        f"only the {size} ({row['model']}): {row[column]:,}"
        for size, row in ends.items()
    )


def _measured(runs: SweepRuns) -> str:
    folders = "".join(f"- `{sweep.folder}`\n" for sweep in runs.sweeps)
    return (
        f"{tables.markdown(models_table(runs))}\n"
        f"Windows: `{runs.windows}` (sha256 `{runs.windows_sha256[:16]}`). "
        f"{asked(runs)} Precision of matrix products: `{runs.precision}`. "
        f"Sweeps:\n\n{folders}"
    )


def _figure_section(finding: Finding) -> str:
    name, title = finding.figure.name, finding.figure.title
    contents = finding.tables()
    links = ", ".join(f"[{table}.csv]({TABLES}/{table}.csv)" for table in contents)
    return (
        f"## {title}\n\n![{title}]({name}.png)\n\n{finding.caption}\n\n"
        f"{tables.markdown(contents[name])}\n{links}\n"
    )


def _table_1_section(sets: MemorizedSets, runs: SweepRuns) -> str:
    table = tables.markdown_of(tables.set_matrix(*sets.shown()))
    return (
        f"## {TABLE_1_TITLE}\n\n{table_1_caption(sets, runs)}\n\n{table}\n"
        f"All lengths and contexts: [pairs of models, CSV]({TABLES}/{TABLE_1}.csv), "
        f"[models, CSV]({TABLES}/{TABLE_1_MODELS}.csv)\n"
    )


def left_out(runs: SweepRuns, found: Findings, sets: MemorizedSets) -> list[str]:
    """A sentence on everything that a reader may miss in the figures."""
    records = runs.records
    notes = []
    without = runs.num_windows - records["window_id"].n_unique()
    if without:
        notes.append(
            f"{without:,} of {runs.num_windows:,} windows have no record: too short "
            "for every context (a window as long as the suffix leaves no prompt), or "
            "not taken by the sweep."
        )
    full = queries.at_full_context(records, runs.suffix_length)
    shorter = len(records) - len(full)
    if shorter:
        notes.append(
            f"{shorter:,} records have a shorter prompt than their window allows and "
            "are in Figure 5 only."
        )
    shared = queries.shared_by_models(full, len(runs.models))
    apart = full["window_id"].n_unique() - shared["window_id"].n_unique()
    if apart:
        notes.append(
            f"{apart:,} windows were not put to every model with full context, and are "
            "in no figure that compares models."
        )
    empty = shared.filter(pl.col("context") == 0)["window_id"].n_unique()
    if empty:
        notes.append(
            f"{empty:,} windows have an empty prompt: they are in no figure with the "
            "tokens of context on its axis, which is logarithmic."
        )
    notes += found.notes
    if sets.cell is None:
        why = (
            "models share no window and context"
            if len(runs.models) > 1
            else "it needs two models"
        )
        notes.append(f"{TABLE_1_TITLE}: not shown, as {why}.")
    if not any(model.baseline for model in runs.models):
        notes.append(
            "No baseline: without a model that has not seen the corpus, nothing here "
            "tells memorization from what any model would predict (sweep with "
            "--config.baselines)."
        )
    if records["tokens_correct"].has_nulls():
        notes.append(
            "Of windows swept for verdicts only, right tokens, margins and ties are "
            "not known."
        )
    notes.append(
        "Windows are at random positions of the corpus, so that most of them occur as "
        "seldom there as most of its text does."
        if runs.sample == UNIFORM
        else _short_buckets(runs)
    )
    return notes


def _short_buckets(runs: SweepRuns) -> str:
    """Which buckets have fewer windows than asked for, as the evaluation set says."""
    cells = _bucket_list(runs)
    if cells is None:
        return (
            f"The evaluation set is no longer at `{runs.windows}`, so which of its "
            f"buckets are short is not known; {TABLES}/windows.csv has the number of "
            "windows in each."
        )
    short = [cell for cell in cells if cell["short"]]
    if not short:
        return "No bucket of the evaluation set is short."
    listed = ", ".join(
        f"{cell['length']}/{cell['bucket']} ({cell['taken']:,})" for cell in short
    )
    return (
        f"{len(short)} of {len(cells)} buckets of the evaluation set are short, and "
        f"are used with the windows that they have; length/bucket (windows): {listed}."
    )


def _bucket_list(runs: SweepRuns) -> Sequence[dict[str, Any]] | None:
    path = pathlib.Path(runs.windows).expanduser() / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if manifest.get("windows_sha256") != runs.windows_sha256:
        return None
    return manifest.get("buckets")
