"""How pictures are saved."""

import os
import pathlib

import matplotlib.figure


def save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
    """Replaces the file at `path` by a PNG, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=150)
    os.replace(partial, path)
