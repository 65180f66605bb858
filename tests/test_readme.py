"""Everything that the README tells a reader to run, run."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()

# What makes a command of the README small, by the module it runs or its config.
STDLIB = "--config=experiments/dp/configs/stdlib_transformer.py"
SMALL = {
    "experiments.dp.train": [
        "--config.dataset=digits",
        "--config.model=mlp",
        "--config.num_steps=2",
        "--config.batch_size=32",
    ],
    STDLIB: [
        "--config.model=transformer:width=8:heads=2",
        "--config.num_steps=2",
        "--config.batch_size=32",
    ],
    "experiments.dp.benchmark": [
        "--config.cells=mlp@8x8x1@2",
        "--config.methods=auto",
        "--config.repetitions=1",
        "--config.slow_repetitions=1",
        "--config.compile_repetitions=1",
        "--config.round_seconds=0.001",
    ],
}


# What makes the pipeline of extraction small, by the module it runs.
SMALL_EXTRACTION = {
    "build_corpus": [
        "--corpus=text:experiments/extraction/*.py",
        "--tokenizer=bpe:300",
        "--max_tokens=6000",
    ],
    "build_dataset": ["--lengths=60", "--per_bucket=20"],
    "train_lm": [
        "--config.num_steps=2",
        "--config.model=gpt2:layers=1:width=8:heads=2",
    ],
    "sweep": ["--config.windows_per_bucket=5"],
    "report": [],
    "benchmark_sweep": [
        "--model=gpt2:layers=1:width=8:heads=2",
        "--vocabulary_size=20",
        "--rounds=1",
        "--transformers_python=",
    ],
    "benchmark_dataset": ["--num_tokens=20000"],
    "benchmark_beam_search": [
        "--model=gpt2:layers=1:width=8:heads=2",
        "--vocabulary_size=20",
        "--contexts=2",
        "--num_beams=3",
        "--rounds=1",
    ],
}


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _commands():
    lines = "".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


def _run(arguments, **changes):
    return subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **changes},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_training_loop_runs_as_pasted():
    setup, loop, _ = _blocks("python")
    assert len([line for line in loop.splitlines() if line]) <= 16
    accuracy = (
        "logits = x @ params['w'] + params['b']\n"
        "print('accuracy', jnp.mean(jnp.argmax(logits, axis=1) == y))\n"
    )
    result = _run([sys.executable, "-c", setup + loop + accuracy])
    assert result.returncode == 0, result.stderr
    printed = dict(line.split() for line in result.stdout.splitlines())
    assert float(printed["accuracy"]) > 0.85
    assert 2.9 < float(printed["epsilon"]) <= 3.0


def test_the_check_for_mixed_examples_runs_as_pasted():
    setup, _, check = _blocks("python")
    result = _run([sys.executable, "-c", setup + check])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "command", [c for c in _commands() if c.startswith("python -m experiments.dp")]
)
def test_command_runs(command, tmp_path):
    _, _, module, *arguments = shlex.split(command)
    if "--help" not in arguments:
        small = SMALL[STDLIB if STDLIB in arguments else module]
        # Given twice, a tuple would hold the entries of both.
        replaced = {argument.split("=")[0] for argument in small}
        arguments = [a for a in arguments if a.split("=")[0] not in replaced]
        arguments += [*small, f"--config.out={tmp_path / 'run'}"]
    result = _run([sys.executable, "-m", module, *arguments])
    assert result.returncode == 0, result.stderr


def test_the_pipeline_of_extraction_runs(tmp_path):
    """One command after another, each on what those before it made."""
    commands = [c for c in _commands() if "-m experiments.extraction." in c]
    modules = []
    for command in commands:
        _, _, module, *arguments = shlex.split(command)
        modules.append(module.removeprefix("experiments.extraction."))
        small = SMALL_EXTRACTION[modules[-1]]
        replaced = {argument.split("=")[0] for argument in small}
        arguments = [a for a in arguments if a.split("=")[0] not in replaced] + small
        arguments = [a.replace("runs/", f"{tmp_path}/") for a in arguments]
        result = _run([sys.executable, "-m", module, *arguments])
        assert result.returncode == 0, result.stderr
    assert set(modules) == set(SMALL_EXTRACTION)
    assert (tmp_path / "report" / "figure_1a.png").stat().st_size > 0


def test_quickstart_and_figure_2_run(tmp_path):
    """In the environment of the tests, which is what the script would make."""
    figure_1 = str(tmp_path / "figure_1")
    result = _run(
        [
            "bash",
            "launch/quickstart.sh",
            "--config.num_steps=3",
            f"--config.out={tmp_path / 'run'}",
        ],
        VENV=sys.prefix,
        FIGURE_1_SCALE="tiny",
        FIGURE_1_OUT=figure_1,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"times the non-private time", result.stdout)
    assert re.search(r"Test accuracy \d\.\d+ .*epsilon \d", result.stdout)
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 0
    for name in "abc":
        assert (_report(result) / f"figure_1{name}.png").stat().st_size > 0
    # On the models of the first.
    result = _run(
        ["bash", "launch/figure_2.sh", "tiny", str(tmp_path / "2"), figure_1],
        VENV=sys.prefix,
    )
    assert result.returncode == 0, result.stderr
    for name in ("beams", "anywhere"):
        assert (_report(result) / f"figure_2c_{name}.png").stat().st_size > 0
    for name in "ab":
        assert (tmp_path / "2" / "report" / f"figure_2{name}.png").stat().st_size > 0


def test_figure_4_runs(tmp_path):
    result = _run(
        ["bash", "launch/figure_4.sh", "tiny", str(tmp_path)], VENV=sys.prefix
    )
    assert result.returncode == 0, result.stderr
    for name in "ab":
        assert (_report(result) / f"figure_4{name}.png").stat().st_size > 0
    folder = tmp_path / "report_figure_4c"
    assert (folder / "figure_4c.png").stat().st_size > 0
    assert (folder / "tables" / "figure_4c_tests.csv").stat().st_size > 0


def _report(result):
    last = result.stdout.splitlines()[-1]
    return pathlib.Path(last.removeprefix("Report folder: "))


def test_the_other_commands_are_scripts_that_run_here():
    others = [c for c in _commands() if not c.startswith("python -m")]
    assert others == [
        "bash launch/quickstart.sh",
        "bash launch/test.sh",
        "bash launch/figure_1.sh",
        "bash launch/figure_2.sh",
        "bash launch/figure_4.sh",
    ]
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert "launch/test.sh" in ci


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"\b(?:dpjax|experiments|launch|docs)/[\w/.]*\w", README))),
)
def test_files_that_it_names_exist(path):
    assert (REPOSITORY / path).exists()


def test_pip_install_gives_the_library_alone(tmp_path):
    """`pip install .`, without the dependencies, which are listed in pyproject.toml."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    result = _run([*command, "--target", str(tmp_path), "."])
    assert result.returncode == 0, result.stderr
    installed = {
        path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"
    }
    assert installed == {"dpjax"}
    assert (tmp_path / "dpjax" / "py.typed").exists()
    assert (tmp_path / "dpjax" / "norm_rules" / "conv.py").exists()
