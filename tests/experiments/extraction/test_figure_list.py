import dataclasses

import polars as pl
import pytest

from experiments.extraction import figure_list
from experiments.extraction.report_figure import Choices, Figure, Finding, LeftOut
from tests.experiments.extraction import fake_sweeps


@pytest.fixture
def runs():
    return fake_sweeps.runs_of({"extracted": [True]})


def figure(name, shown):
    return Figure(
        name=name,
        title=name.title(),
        measure=lambda runs, choices: shown,
        caption=lambda shown, runs: f"{shown} of {runs.windows}",
        draw=lambda shown: None,
        table=lambda shown: pl.DataFrame({"shown": [shown]}),
        further_tables={"twice": lambda shown: pl.DataFrame({"shown": [2 * shown]})},
    )


def test_files_of_different_figures_have_different_names():
    names = [name for figure in figure_list.FIGURES for name in figure.table_names()]
    assert len(names) == len(set(names))
    titles = [figure.title for figure in figure_list.FIGURES]
    assert len(titles) == len(set(titles))


def test_a_figure_is_shown_or_left_out_with_a_note_or_in_silence(runs, monkeypatch):
    figures = (
        figure("shown", 3),
        figure("noted", LeftOut("nobody looked")),
        figure("silent", None),
    )
    monkeypatch.setattr(figure_list, "FIGURES", figures)
    found = figure_list.measure(runs, Choices())
    assert found.figures == (Finding(figures[0], 3, runs),)
    assert found.notes == ("Noted: not drawn, as nobody looked.",)


def test_a_finding_has_all_that_a_page_needs(runs):
    finding = Finding(figure("name", 3), 3, runs)
    assert finding.caption == "3 of data/windows"
    tables = {name: table.item() for name, table in finding.tables().items()}
    assert tables == {"name": 3, "name_twice": 6}
    assert list(tables) == finding.figure.table_names()
    assert finding.series == ()


def test_choices_reach_the_figures(runs, monkeypatch):
    asked = []
    remembering = dataclasses.replace(
        figure("any", 1), measure=lambda runs, choices: asked.append(choices)
    )
    monkeypatch.setattr(figure_list, "FIGURES", (remembering,))
    figure_list.measure(runs, Choices(seed=5, figure_5_bucket=4))
    assert asked == [Choices(5, 4)]
