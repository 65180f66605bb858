import pathlib
import re

import pytest
from ml_collections.config_flags import config_flags

from experiments import tuple_flags
from experiments.errors import UsageError
from experiments.extraction import sweep_config
from experiments.extraction.sweep_config import SweepConfig

FOLDER = pathlib.Path(sweep_config.__file__).parent / "configs"
CONFIGS = sorted(
    path for path in FOLDER.glob("*.py") if "sweep_config.make(" in path.read_text()
)


def parse(**values):
    config = sweep_config.make(**{"models": ("a",), "windows": "w", **values})
    return sweep_config.parse(config)


def test_defaults_pass_through():
    assert parse(seed=7) == SweepConfig(models=("a",), windows="w", seed=7)


def test_models_with_commas_between():
    assert parse(models=("a,b", "c")).models == ("a", "b", "c")


def test_baselines_alone():
    assert parse(models=(), baselines=("b",)).baselines == ("b",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("models", ()),
        ("models", ("a", "")),
        ("baselines", ("",)),
        ("windows", ""),
        ("contexts", (50, -1)),
        ("contexts", (50, 50)),
        ("batch_size", 0),
        ("windows_per_bucket", 0),
        ("empty_prompt", "pad"),
        ("matmul_precision", "low"),
        ("near_tie", -1e-3),
        ("near_tie", float("inf")),
        ("near_tie", float("nan")),
        ("seed", -1),
        ("beams", -1),
        ("samples", -1),
        ("samples", 2**31),
        ("temperature", 0),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("masking", "words"),
    ],
)
def test_value_out_of_range(name, value):
    with pytest.raises(UsageError, match=rf"^config\.{name}=.*, expected .*--config"):
        parse(**{name: value})


def test_what_decoding_is_checked_against_must_be_known():
    with pytest.raises(
        UsageError, match=r"verdicts_only=True, expected False with dec"
    ):
        parse(decode=True, verdicts_only=True)


def test_beams_need_what_they_are_compared_to():
    assert parse(decode=True, beams=100).beams == 100
    with pytest.raises(UsageError, match=r"beams=100, expected 0 without decode=True"):
        parse(beams=100)


@pytest.mark.parametrize("scheme", [{"samples": 1}, {"temperature": 2}, {"top_k": 5}])
def test_what_a_scheme_draws_is_no_verdict_alone(scheme):
    assert parse(**scheme).has_scheme
    with pytest.raises(UsageError, match="verdicts_only=True, expected False with sam"):
        parse(verdicts_only=True, **scheme)


@pytest.mark.parametrize(
    "values",
    [
        {"decode": True},
        {"verdicts_only": True},
        {"contexts": (50,)},
        {"empty_prompt": "bos"},
        {"corpus": "tokens:x"},
        {"beams": 100},
        {"samples": 1},
        {"temperature": 0.5},
        {"top_k": 5},
    ],
)
def test_what_blanks_have_no_use_for(values):
    assert parse(masking="iid").masking == "iid"
    ((name, value),) = values.items()
    default = getattr(SweepConfig, name)
    told = (
        rf"config\.{name}={re.escape(repr(value))}, expected {re.escape(repr(default))}"
    )
    with pytest.raises(UsageError, match=rf"^{told} with masking, .*--config\.{name}$"):
        parse(masking="iid", **values)


@pytest.fixture
def flags_of_tuples():
    tuple_flags.register()
    yield
    config_flags.register_flag_parser_for_type(
        tuple, tuple_flags.tuple_parser.TupleParser()
    )


# ml_collections loads config files by a deprecated function.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.usefixtures("flags_of_tuples")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_valid_once_folders_are_given(path, monkeypatch):
    arguments = [
        f"--config={path}",
        "--config.models=/models/1b,/models/a b",
        "--config.baselines=",
        "--config.windows=/windows",
    ]
    monkeypatch.setattr("sys.argv", ["sweep", *arguments])
    flag_values = config_flags.flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=flag_values)
    flag_values(["sweep", *arguments])
    parsed = sweep_config.parse(flag.value)
    assert parsed.models == ("/models/1b", "/models/a b")
    assert parsed.baselines == ()
    assert not parsed.out
    assert parsed.matmul_precision == "highest"


def test_there_are_configs():
    assert {path.stem for path in CONFIGS} >= {"figure_1", "pile_figure_1"}
