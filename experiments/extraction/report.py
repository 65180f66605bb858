"""Figures and tables of what sweeps found: how memorization grows.

    python -m experiments.extraction.report --runs=runs/sweep --out=reports/sweep
    python -m experiments.extraction.report --runs=runs/members,runs/baselines \\
        --out=reports/both

Writes

  report.md       shows all the rest
  report.html     the same in one file that needs no other and no network, and windows
                  to browse: the prompt, the truth, and what each model made of it
  FIGURE.png      each of the figures below that the sweeps have the records for
  tables/         the numbers of each figure, the log-linear fits, the models, the
                  windows in each bucket, and Table 1 (what one model memorised and
                  another did not): CSV in full precision, and Markdown

FIGURE is, with the numbers of Carlini et al. 2023 (arXiv 2202.07646),

  figure_1a           fraction of windows that are extractable, against parameters
  figure_1b           against how often a window occurs in the corpus
  figure_1c           against the tokens of context
  figure_2a, 2b       of random windows: against parameters, and against their length
  figure_2c_beams     greedy decoding beside beam search (sweep with --config.beams)
  figure_2c_anywhere  the true suffix beside a match anywhere in the corpus (sweep with
                      --config.decode and --config.corpus)
  figure_4a, 4b       of T5 models that fill blanks: against parameters, and occurrences
  figure_4c           of models of one size: one line for each training set
  figure_5            against the tokens of context, for each length of window
  approximate         suffixes that are nearly right (sweep with --config.decode)
  discoverable        windows that n draws discover, against n
  whitespace, entropy against how plain the text of a window is

Windows are not independent:
intervals and fits take the repeated passage in which windows lie as the unit (see
cluster_statistics.py).

The HTML page shows what windows say by the evaluation set that was swept (--windows
says where it is now, if it was moved) and the tokenizer.json in its folder, and what
models made of them if the sweep decoded. Without decoding, it shows as much as verdicts
tell.

Several sweeps are put together if they are about the same windows, with the same
precision. Models are then compared on the windows that all of them were asked about.

Run again with the same --runs and --out, a report replaces its own files and leaves
others alone. The same sweeps and seed make the same bytes.
"""

import dataclasses
import pathlib
from typing import Any

import matplotlib.figure
import polars as pl
from absl import flags

from experiments import command_line, plots, run_folder
from experiments.errors import UsageError
from experiments.extraction import (
    figure_list,
    gallery,
    html_page,
    memorized_sets,
    queries,
    report_folder,
    report_page,
    sweep_runs,
    tables,
    token_texts,
)
from experiments.extraction.figure_list import FIGURES
from experiments.extraction.memorized_sets import MemorizedSets
from experiments.extraction.report_figure import Choices, Figure, Findings
from experiments.extraction.report_page import (
    HTML,
    TABLE_1,
    TABLE_1_MODELS,
    TABLES,
)
from experiments.extraction.sweep_runs import SweepRuns

REPORT = "report.md"
GALLERY_WINDOWS = 5000


def main() -> None:
    """Reports on what the flags say; the last line of output names the folder."""
    if not flags.FLAGS.runs:
        raise UsageError(
            "--runs is missing: give --runs=DIR[,DIR...], folders of sweeps"
        )
    folder = report(
        [pathlib.Path(run).expanduser() for run in flags.FLAGS.runs],
        flags.FLAGS.out,
        figure_5_bucket=flags.FLAGS.figure_5_bucket,
        table_1_length=flags.FLAGS.table_1_length,
        table_1_context=flags.FLAGS.table_1_context,
        windows=flags.FLAGS.windows,
        gallery_windows=flags.FLAGS.gallery_windows,
        seed=flags.FLAGS.seed,
    )
    print(f"Report folder: {folder}")


def report(
    folders: list[pathlib.Path],
    out: str = "",
    *,
    figure_5_bucket: int | None = None,
    table_1_length: int | None = None,
    table_1_context: int | None = None,
    windows: str = "",
    gallery_windows: int = GALLERY_WINDOWS,
    seed: int = 0,
) -> pathlib.Path:
    """Writes a report on the sweeps in `folders`, prints the fits, returns its folder.

    Args:
      folders: Of sweeps, at least one.
      out: The report's folder; empty makes a new one under runs/.
      figure_5_bucket: Bucket of Figure 5; None takes the one with most windows.
      table_1_length: Length of the windows of Table 1, in tokens; None takes the one
        with most windows.
      table_1_context: Their context, likewise.
      windows: The folder of the evaluation set, if it is not where the sweep found it.
      gallery_windows: How many windows to show in the page, at most; one at several
        contexts counts as several.
      seed: Of the resamples, and of the choice of these windows.

    Raises:
      UsageError: The sweeps do not go together, or `out` is taken.
      RunError: A sweep has not ended or is damaged.
    """
    runs = sweep_runs.load(folders)
    if windows:
        token_texts.check_windows(
            pathlib.Path(windows).expanduser(), runs.windows_sha256
        )
        runs = dataclasses.replace(runs, windows=windows)
    _check_bucket(runs, figure_5_bucket)
    sets = _compare(runs, table_1_length, table_1_context)
    folder = run_folder.choose(out, "report", flag="--out").resolve()
    with run_folder.locked(folder, "wait for it or give another --out"):
        report_folder.claim(folder, runs.sweeps, _possible_files())
        found = figure_list.measure(runs, Choices(seed, figure_5_bucket))
        fits = tables.fits({f.figure.name: f.series for f in found.figures})
        files = _files(runs, found, fits, sets, seed)
        _write(folder, files)
        page = html_page.write_page(
            runs,
            found,
            fits,
            sets,
            gallery.collect(runs, gallery_windows, seed),
            {
                finding.figure.name: (folder / _picture(finding.figure)).read_bytes()
                for finding in found.figures
            },
            seed,
        )
        run_folder.write_atomically(folder / HTML, page)
        report_folder.finish(folder, runs.sweeps, sorted([*files, HTML]))
    print(tables.markdown(fits))
    return folder


def _check_bucket(runs: SweepRuns, bucket: int | None) -> None:
    buckets = queries.buckets(runs.records)["bucket"].to_list()
    if bucket is not None and bucket not in buckets:
        raise UsageError(
            f"--figure_5_bucket={bucket}: expected one of the sweep's buckets: "
            f"{', '.join(map(str, buckets))}"
        )


def _compare(runs: SweepRuns, length: int | None, context: int | None) -> MemorizedSets:
    """Table 1, for windows of `length` and prompts of `context` if these are given."""
    totals = memorized_sets.totals(runs.records, runs.models)
    pairs = memorized_sets.pairs(runs.records, runs.models)
    if pairs.is_empty():
        return MemorizedSets(totals, pairs, None)
    cell = memorized_sets.choose_cell(totals, runs.suffix_length, length, context)
    if cell is None:
        cells = totals.select("length", "context").unique(maintain_order=True)
        asked = {"--table_1_length": length, "--table_1_context": context}
        given = " ".join(f"{k}={v}" for k, v in asked.items() if v is not None)
        raise UsageError(
            f"{given}: expected a length and context that every model was given: "
            + ", ".join(f"{a}/{b}" for a, b in cells.iter_rows())
        )
    return MemorizedSets(totals, pairs, cell)


def _files(
    runs: SweepRuns, found: Findings, fits: pl.DataFrame, sets: MemorizedSets, seed: int
) -> dict[str, str | matplotlib.figure.Figure]:
    """What the report consists of, by its path in the folder."""
    contents = {
        "fits": fits,
        "models": report_page.models_table(runs),
        "windows": queries.windows_per_bucket(runs.records),
    }
    files: dict[str, str | matplotlib.figure.Figure] = {}
    for finding in found.figures:
        contents |= finding.tables()
        files[_picture(finding.figure)] = finding.draw()
    people = {name: tables.markdown(table) for name, table in contents.items()}
    if sets.cell is not None:
        contents |= {TABLE_1: sets.pairs, TABLE_1_MODELS: sets.totals}
        people |= {
            TABLE_1: tables.markdown_of(tables.set_matrix(*sets.shown())),
            TABLE_1_MODELS: tables.markdown(sets.totals),
        }
    for name, table in contents.items():
        files[f"{TABLES}/{name}.csv"] = table.write_csv()
        files[f"{TABLES}/{name}.md"] = people[name]
    # Last: what it points to is there.
    files[REPORT] = report_page.write_page(runs, found, fits, sets, seed)
    return files


def _picture(figure: Figure[Any]) -> str:
    return f"{figure.name}.png"


def _possible_files() -> list[str]:
    names = ["fits", "models", "windows", TABLE_1, TABLE_1_MODELS]
    names += [name for figure in FIGURES for name in figure.table_names()]
    return [
        REPORT,
        HTML,
        *map(_picture, FIGURES),
        *(f"{TABLES}/{name}.{kind}" for name in names for kind in ("csv", "md")),
    ]


def _write(
    folder: pathlib.Path, files: dict[str, str | matplotlib.figure.Figure]
) -> None:
    (folder / TABLES).mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, str):
            run_folder.write_atomically(folder / name, content)
        else:
            plots.save(content, folder / name)


if __name__ == "__main__":
    flags.DEFINE_list(
        "runs", None, "Folders of finished sweeps, with commas between them."
    )
    flags.DEFINE_string(
        "out", "", "The report's folder; empty makes a new one under runs/."
    )
    flags.DEFINE_integer(
        "figure_5_bucket",
        None,
        "Bucket of counts that Figure 5 is about; by default the one with most windows "
        "at every length, and of several such the one with most repetitions.",
    )
    flags.DEFINE_integer(
        "table_1_length",
        None,
        "Length in tokens of the windows that the Table 1 of report.md is about; by "
        "default that with most windows, and of several such the shortest.",
    )
    flags.DEFINE_integer(
        "table_1_context",
        None,
        "Length in tokens of their prompts; by default that with most windows, and of "
        "several such all of the window but the suffix.",
    )
    flags.DEFINE_string(
        "windows",
        "",
        "Folder of the evaluation set; by default where the sweep found it.",
    )
    flags.DEFINE_integer(
        "gallery_windows",
        GALLERY_WINDOWS,
        "How many windows to show in report.html, at most: some of each selection, and "
        "the rest evenly from the buckets. A window at several contexts counts as "
        "several.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "seed", 0, "Seed of the resamples and of the windows shown.", lower_bound=0
    )
    command_line.run(main, config_keys=())
