import sys

import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import benchmark_sweep
from experiments.extraction.benchmark_sweep import Settings

TINY = {
    "model": "gpt2:layers=1:width=8:heads=2",
    "vocabulary_size": 20,
    "batch_size": 4,
    "context": 3,
    "rounds": 2,
}


def test_times_every_way(tmp_path):
    result = benchmark_sweep.measure(tmp_path, Settings(**TINY, extractable=0.5))
    assert set(result["seconds"]) == {"all columns", "verdicts only", "decoding"}
    assert min(result["seconds"].values()) > 0
    assert result["context"] == 3
    assert (tmp_path / "model" / "model.safetensors").exists()


# What transformers_generate.py says to its caller, without torch.
FAKE = """
import sys
import numpy as np

*_, prompts, num_tokens = sys.argv
np.save(prompts + ".generated.npy", np.zeros((4, int(num_tokens)), int))
print("torch 0, transformers 0", flush=True)
for _ in sys.stdin:
    print("done", flush=True)
"""


def test_takes_turns_with_another_interpreter(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{FAKE}")
    fake.chmod(0o755)
    settings = Settings(**TINY, transformers_python=str(fake))
    (tmp_path / "out").mkdir()
    result = benchmark_sweep.measure(tmp_path / "out", settings)
    assert result["versions_of_transformers"] == "torch 0, transformers 0"
    assert 0 <= result["share_of_equal_generations"] < 1
    faster = result["times_faster_than_transformers"]
    assert faster["transformers generate"] == 1
    assert faster["decoding"] > 0


@pytest.mark.parametrize(
    ("python", "error", "message"),
    [
        ("/nowhere/python", UsageError, r"does not start.*name an interpreter"),
        ("/bin/true", RunError, r"install torch and transformers"),
    ],
)
def test_an_interpreter_that_will_not_do(tmp_path, python, error, message):
    settings = Settings(**TINY, transformers_python=python)
    with pytest.raises(error, match=message):
        benchmark_sweep.measure(tmp_path, settings)
