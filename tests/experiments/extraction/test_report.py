import base64
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import matplotlib.image
import polars as pl
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import report, trends
from tests.experiments.extraction import fake_sweeps

WINDOWS = fake_sweeps.make_windows(per_bucket=12)
MEMBERS = {"small": 100_000, "large": 5_000_000}
BASELINES = {"other": 100_000}
TEXT = "".join(f"line {i} of a text\n" for i in range(200))
FIGURES = ("figure_1a", "figure_1b", "figure_1c", "figure_5", "discoverable")
TABLES = (*FIGURES, "fits", "models", "windows", "table_1", "table_1_models")


def files_of(figures, more_tables=()):
    tables = {*figures, *more_tables, *TABLES[len(FIGURES) :]}
    return {
        *("report.json", "report.md", "report.html"),
        *(f"{name}.png" for name in figures),
        *(f"tables/{name}.{kind}" for name in tables for kind in ("csv", "md")),
    }


FILES = files_of(FIGURES)


@pytest.fixture
def sweep(tmp_path):
    return fake_sweeps.write(
        tmp_path / "sweep", WINDOWS, MEMBERS, BASELINES, contexts=(50, 150, 450)
    )


@pytest.fixture
def quick(monkeypatch):
    """Pictures are described instead of drawn, which takes most of the time."""
    monkeypatch.setattr(
        report.plots,
        "save",
        lambda figure, path: path.write_text(
            "; ".join(text.get_text() for ax in figure.axes for text in ax.texts)
        ),
    )


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_the_report_is_complete_and_the_same_each_time(sweep, tmp_path, capsys):
    folder = report.report([sweep], str(tmp_path / "out"))
    assert contents(folder).keys() == FILES
    page = (folder / "report.md").read_text()
    for name in (*FIGURES, "fits"):
        assert f"(tables/{name}.csv)" in page
        assert (folder / f"tables/{name}.md").read_text() in page
    for name in FIGURES:
        assert f"({name}.png)" in page
        assert matplotlib.image.imread(folder / f"{name}.png").std() > 0.02
    assert f"`{sweep}`" in page
    assert "Precision of matrix products: `highest`" in page
    assert "`data/windows`" in page
    assert "144 windows in" in page
    assert "(report.html)" in page
    html = (folder / "report.html").read_text()
    for name in FIGURES:
        picture = (folder / f"{name}.png").read_bytes()
        assert f"base64,{base64.b64encode(picture).decode()}" in html
    fits = (folder / "tables/fits.md").read_text()
    assert fits in capsys.readouterr().out
    windows = pl.read_csv(folder / "tables/windows.csv")
    assert windows["windows"].to_list() == [12] * 12
    again = report.report([sweep], str(tmp_path / "again"))
    assert contents(again) == contents(folder)


def test_a_sweep_that_measured_everything_has_every_figure(tmp_path):
    further = (
        fake_sweeps.with_plainness,
        fake_sweeps.with_near_misses,
        fake_sweeps.with_anywhere,
        fake_sweeps.with_beams,
        fake_sweeps.with_scheme(samples=9),
    )
    sweep = fake_sweeps.write(
        tmp_path / "sweep",
        WINDOWS,
        MEMBERS | {"twin": 5_000_000},
        BASELINES,
        text=TEXT,
        further=further,
        config={"beams": 7, "samples": 9, "top_k": 40},
        sample="by_count",
    )
    folder = report.report([sweep], str(tmp_path / "out"))
    figures = {*FIGURES, "figure_2c_beams", "figure_2c_anywhere", "figure_4c"}
    figures |= {"approximate", "whitespace", "entropy"}
    tables = {"figure_2c_beams_summary", "figure_2c_anywhere_summary"}
    tables |= {"figure_4c_tests", "whitespace_buckets", "entropy_buckets"}
    assert contents(folder).keys() == files_of(figures, tables)
    page, html = ((folder / f"report.{kind}").read_text() for kind in ("md", "html"))
    for name in figures:
        picture = (folder / f"{name}.png").read_bytes()
        assert matplotlib.image.imread(folder / f"{name}.png").std() > 0.02
        assert f"base64,{base64.b64encode(picture).decode()}" in html
        assert f"({name}.png)" in page
        assert f"(tables/{name}.csv)" in page
    for name in tables:
        assert f"(tables/{name}.csv)" in page
    for words in ("most likely of 7 beams", "40 likeliest tokens", "Of 9 draws"):
        assert words in page
        assert words in html


@pytest.mark.usefixtures("quick")
def test_random_windows_have_figures_of_their_own(tmp_path):
    sweep = fake_sweeps.write(
        tmp_path / "sweep", WINDOWS, MEMBERS, BASELINES, sample="uniform"
    )
    folder = report.report([sweep], str(tmp_path / "out"))
    figures = {"figure_2a", "figure_2b", "figure_5", "discoverable"}
    assert contents(folder).keys() == files_of(figures)
    fits = pl.read_csv(folder / "tables/fits.csv")
    assert set(fits["figure"]) == {"figure_2a", "figure_2b"}
    page = (folder / "report.md").read_text()
    assert "Figure 1" not in page
    assert "Windows are at random positions of the corpus, so that" in page
    lengths = pl.read_csv(folder / "tables/figure_2b.csv")
    assert lengths["length"].to_list() == [100, 200, 500] * 3


@pytest.mark.usefixtures("quick")
def test_two_sweeps_make_the_report_of_one(sweep, tmp_path):
    whole = report.report([sweep], str(tmp_path / "whole"))
    parts = [
        fake_sweeps.write(
            tmp_path / f"sweep{i}", WINDOWS, members, baselines, (50, 150, 450)
        )
        for i, (members, baselines) in enumerate([(MEMBERS, {}), ({}, BASELINES)])
    ]
    both = report.report(parts, str(tmp_path / "both"))
    ours, theirs = contents(whole), contents(both)
    for name in FILES - {"report.json", "report.md", "report.html"}:
        assert ours[name] == theirs[name], name


@pytest.mark.usefixtures("quick")
def test_a_report_replaces_its_own_files_only(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    before = contents(folder)
    (folder / "figure_1a.png").write_bytes(b"half a pict")
    (folder / "note.txt").write_text("mine")
    (folder / "figure_5.png").unlink()
    assert report.report([sweep], str(folder)) == folder
    assert contents(folder) == before | {"note.txt": b"mine"}
    # Another choice for the same sweep is the same report.
    report.report([sweep], str(folder), figure_5_bucket=0, seed=1)
    assert contents(folder).keys() == before.keys() | {"note.txt"}
    assert contents(folder) != before | {"note.txt": b"mine"}


@pytest.mark.usefixtures("quick")
def test_a_moved_sweep_is_the_same_sweep(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    report.report([shutil.move(sweep, tmp_path / "moved")], str(folder))
    assert "/moved" in (folder / "report.md").read_text()


@pytest.mark.usefixtures("quick")
def test_the_report_on_other_records_is_left_alone(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    before = contents(folder)
    other = fake_sweeps.write(tmp_path / "other", WINDOWS, MEMBERS, BASELINES)
    for runs in ([other], [sweep, other]):
        with pytest.raises(UsageError, match=r"report on other records, of .*/sweep:"):
            report.report(runs, str(folder))
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["report.md", "anything"])
def test_a_folder_of_something_else_is_left_alone(sweep, tmp_path, name):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(UsageError, match=f"holds '{name}' but no report.json"):
        report.report([sweep], str(folder))
    assert contents(folder) == {name: b"mine"}
    with pytest.raises(UsageError, match=r"no report\.json"):
        report.report([sweep], str(sweep))


@pytest.mark.usefixtures("quick")
def test_a_file_that_is_not_the_reports_is_left_alone(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    path = folder / "report.json"
    manifest = json.loads(path.read_text())
    manifest["files"].remove("figure_5.png")
    path.write_text(json.dumps(manifest))
    before = contents(folder)
    with pytest.raises(UsageError, match=r"'figure_5.png', which is not the report's"):
        report.report([sweep], str(folder))
    assert contents(folder) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_a_damaged_report_json_is_refused(sweep, tmp_path, text):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "report.json").write_text(text)
    with pytest.raises(RunError, match=r"report.json is not a report's"):
        report.report([sweep], str(folder))
    assert contents(folder) == {"report.json": text.encode()}


@pytest.mark.usefixtures("quick")
def test_a_report_that_was_stopped_is_written_again(sweep, tmp_path, monkeypatch):
    def disk_full(*_):
        raise OSError("no space left")

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(report.plots, "save", disk_full)
        with pytest.raises(OSError, match="no space left"):
            report.report([sweep], str(folder))
    report.report([sweep], str(folder))
    assert contents(folder).keys() == FILES


@pytest.mark.usefixtures("quick")
def test_figures_that_are_no_longer_drawn_go(tmp_path, monkeypatch):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, BASELINES)
    folder = report.report([sweep], str(tmp_path / "out"))
    by_context = trends.by_context
    monkeypatch.setattr(
        trends,
        "by_context",
        lambda runs, seed: dataclasses.replace(by_context(runs, seed), series=()),
    )
    report.report([sweep], str(folder))
    gone = {"figure_1c.png", "tables/figure_1c.csv", "tables/figure_1c.md"}
    assert contents(folder).keys() == FILES - gone
    assert "Figure 1c: context: not drawn" in (folder / "report.md").read_text()


@pytest.mark.usefixtures("quick")
def test_table_1_is_about_the_prompts_asked_for(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    shown = (folder / "tables/table_1.md").read_text()
    page = (folder / "report.md").read_text()
    assert shown in page
    # Most windows are prompted by 50 tokens; of these, lengths of 100 are at full
    # context.
    assert "Of 48 windows of 100 tokens, prompted by their first 50 and given" in page
    models = pl.read_csv(folder / "tables/table_1_models.csv")
    first = models.filter(length=100, context=50)
    only = dict(first.select("model", "only").rows())
    assert f"only the smallest (small): {only['small']}" in page
    assert f"only the largest (large): {only['large']}" in page
    assert only["large"] > 0
    assert only["other"] is None
    report.report([sweep], str(folder), table_1_length=500, table_1_context=150)
    assert (
        "windows of 500 tokens, prompted by their first 150"
        in (folder / "report.md").read_text()
    )
    # All lengths and contexts are there whichever is shown.
    assert pl.read_csv(folder / "tables/table_1_models.csv").equals(models)
    assert len(models) == 3 * (1 + 2 + 3)


@pytest.mark.usefixtures("quick")
def test_one_model_has_no_table_1(tmp_path):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, {"a": 1_000_000}, {})
    page = page_of(sweep, tmp_path)
    assert "another: not shown, as it needs two models" in page
    assert not (tmp_path / "out/tables/table_1.csv").exists()


def test_prompts_that_are_not_there_are_refused(sweep, tmp_path):
    asked = {"table_1_length": 100, "table_1_context": 150}
    with pytest.raises(UsageError, match=r"^--table_1_length=100 .* 100/50, 200/50, "):
        report.report([sweep], str(tmp_path / "out"), **asked)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick")
def test_an_evaluation_set_that_was_moved_is_found(tmp_path):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, text=TEXT)
    moved = shutil.move(sweep / "windows", tmp_path / "moved")
    folder = report.report([sweep], str(tmp_path / "out"), gallery_windows=20)
    assert (
        "Prompts and continuations are not known"
        in (folder / "report.html").read_text()
    )
    report.report([sweep], str(folder), windows=moved, gallery_windows=20)
    html = (folder / "report.html").read_text()
    assert "are not known" not in html
    assert "20 of 144 prompts are here" in html
    assert f"<code>{moved}</code>" in html


def test_another_evaluation_set_is_refused(tmp_path):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, text=TEXT)
    other = tmp_path / "other/windows"
    fake_sweeps.write_windows(other, WINDOWS, TEXT[::-1])
    for folder, message in ((other, "but the sweep was about"), (sweep, "holds no")):
        with pytest.raises(UsageError, match=message):
            report.report([sweep], str(tmp_path / "out"), windows=str(folder))
    assert not (tmp_path / "out").exists()


def test_a_bucket_that_is_not_there_is_refused(sweep, tmp_path):
    with pytest.raises(UsageError, match=r"figure_5_bucket=7: .* 0, 4, 8, 12"):
        report.report([sweep], str(tmp_path / "out"), figure_5_bucket=7)
    assert not (tmp_path / "out").exists()


def page_of(sweep, tmp_path):
    folder = report.report([sweep], str(tmp_path / "out"))
    return (folder / "report.md").read_text()


@pytest.mark.usefixtures("quick")
def test_the_page_says_what_was_left_out(tmp_path):
    sweep = fake_sweeps.write(
        tmp_path / "sweep", WINDOWS, MEMBERS, {}, (20, 50), verdicts_only=True
    )
    page = page_of(sweep, tmp_path)
    # Of the lengths 100, 200 and 500 the first alone is at full context.
    assert f"{2 * (48 * 5):,} records have a shorter prompt" in page
    assert "No baseline" in page
    assert "verdicts only" in page
    assert "no longer at `data/windows`" in page
    assert "| ties" not in page


@pytest.mark.usefixtures("quick")
def test_the_page_says_which_windows_have_no_record(tmp_path):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, contexts=(450,))
    page = page_of(sweep, tmp_path)
    assert "96 of 144 windows have no record" in page
    assert "There is one context for each length, so no lines" in page


@pytest.mark.usefixtures("quick")
def test_the_page_lists_short_buckets(tmp_path, monkeypatch):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, BASELINES)
    monkeypatch.chdir(tmp_path)
    manifest = pathlib.Path("data/windows/manifest.json")
    manifest.parent.mkdir(parents=True)
    cell = {"length": 100, "bucket": 12, "available": 3, "taken": 3}
    cells = [cell | {"short": True}, cell | {"bucket": 0, "short": False}]
    manifest.write_text(json.dumps({"windows_sha256": "5e1f", "buckets": cells}))
    page = page_of(sweep, tmp_path)
    assert "1 of 2 buckets of the evaluation set are short" in page
    assert ": 100/12 (3)." in page
    # Another evaluation set in its place says nothing about this one.
    manifest.write_text(json.dumps({"windows_sha256": "77", "buckets": cells}))
    assert "no longer at `data/windows`" in page_of(sweep, tmp_path)


@pytest.mark.usefixtures("quick")
def test_near_ties_are_counted(sweep, tmp_path):
    path = sweep / "records.parquet"
    records = pl.read_parquet(path)
    margin = pl.when(pl.int_range(pl.len()) < 5).then(5e-4).otherwise(1.0)
    records = records.with_columns(
        min_margin=margin.cast(pl.Float32), tie=pl.int_range(pl.len()) < 2
    )
    records.write_parquet(path)
    folder = report.report([sweep], str(tmp_path / "out"))
    models = pl.read_csv(folder / "tables/models.csv")
    assert models.select("model", "ties", "near_ties").rows() == [
        ("small", 2, 5),
        ("large", 0, 0),
        ("other", 0, 0),
    ]


def test_the_command_line(sweep, tmp_path):
    command = [sys.executable, "-m", "experiments.extraction.report"]
    done = subprocess.run(
        [*command, f"--runs={sweep}", f"--out={tmp_path / 'out'}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"Report folder: {tmp_path / 'out'}"


@pytest.mark.usefixtures("quick")
def test_table_1_has_the_stricter_rule_where_the_corpus_was_searched(sweep, tmp_path):
    page = page_of(sweep, tmp_path)
    assert "so this is the plain rule" in page
    assert "the same, strictly" not in page
    searched = fake_sweeps.write(
        tmp_path / "searched",
        WINDOWS,
        MEMBERS,
        BASELINES,
        (50, 150, 450),
        further=[fake_sweeps.with_anywhere],
    )
    folder = report.report([searched], str(tmp_path / "strict"))
    models = pl.read_csv(folder / "tables/table_1_models.csv")
    only = {
        row["model"]: (row["only"], row["only_strict"])
        for row in models.filter(length=100, context=50).iter_rows(named=True)
    }
    assert only["other"] == (None, None)
    assert 0 < only["large"][1] < only["large"][0]
    page = (folder / "report.md").read_text()
    assert "the same, strictly" in page
    assert f"only the largest (large): {only['large'][0]}. *Strictly*" in page
    assert f"only the largest (large): {only['large'][1]}." in page


@pytest.mark.usefixtures("quick")
def test_a_report_on_blanks_is_about_blanks(tmp_path):
    sweep = fake_sweeps.write(
        tmp_path / "sweep",
        WINDOWS,
        MEMBERS,
        BASELINES,
        text=TEXT,
        further=[fake_sweeps.with_masking, lambda records: records.drop("generated")],
        masking="spans",
        suffix_length=None,
    )
    folder = report.report([sweep], str(tmp_path / "out"))
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {"figure_4a.png", "figure_4b.png"}
    page = (folder / "report.md").read_text()
    assert "windows of 100 tokens, of which 15 were dropped and given to" in page
    assert "dropped in random spans of three on average" in page
    for foreign in ("suffix", "Suffix", "prompted", "shorter prompt", "Figures 1a"):
        assert foreign not in page
    html = (folder / "report.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert data["suffix_length"] is None
    assert {row["targets"] for row in data["rows"]} == {27, 53, 132}
