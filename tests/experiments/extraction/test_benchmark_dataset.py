import subprocess

import numpy as np
import pytest

from experiments.errors import RunError
from experiments.extraction import benchmark_dataset, evaluation_set


def test_the_whole_program_is_measured(tmp_path):
    result = benchmark_dataset.measure(tmp_path, num_tokens=40_000)
    windows = evaluation_set.load(tmp_path / "windows")
    assert windows.manifest["num_tokens"] == result["num_tokens"] == 40_000
    assert windows.windows["count"].max() > 1
    assert min(result["seconds"], result["cpu_seconds"]) > 0
    assert result["peak_memory_bytes"] > 2**24


def test_a_program_that_fails_is_not_measured(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], returncode=2)
    monkeypatch.setattr(benchmark_dataset.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RunError, match="exit code 2"):
        benchmark_dataset.measure(tmp_path, num_tokens=40_000)


def test_the_corpus_is_the_same_every_time():
    one, two = (benchmark_dataset.corpus(20_000, seed=0) for _ in range(2))
    assert one.dtype == np.uint16
    assert (one == two).all()
    assert (one == benchmark_dataset.EOS_ID).sum() > 5
