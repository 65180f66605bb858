import pytest

from experiments.extraction import panels


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("num_panels", [1, 2])
def test_small_print_stays_in_the_picture(num_panels, long):
    figure = panels.new_figure(num_panels)
    about = [
        "3,440 windows in 51 clusters" + long * ", of which some were left out"
    ] * 2
    ax = panels.panel(figure, "Blanks", about, num_panels)
    small = next(text for text in ax.texts if "clusters" in text.get_text())
    assert ("\n" in small.get_text()) == (num_panels > 1 or long)
    figure.canvas.draw()
    extent = small.get_window_extent()
    assert extent.x1 < figure.bbox.x1
    assert extent.y1 < figure.bbox.y1
