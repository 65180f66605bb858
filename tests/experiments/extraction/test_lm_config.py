import pathlib

import pytest
from ml_collections.config_flags import config_flags

from experiments.errors import UsageError
from experiments.extraction import lm_config
from experiments.extraction.lm_config import LmConfig

FOLDER = pathlib.Path(lm_config.__file__).parent / "configs"
CONFIGS = sorted(
    path for path in FOLDER.glob("*.py") if "lm_config.make(" in path.read_text()
)


def parse(**values):
    return lm_config.parse(lm_config.make(**values))


def test_defaults_pass_through():
    assert parse(num_steps=7) == LmConfig(num_steps=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_length", 0),
        ("batch_size", 0),
        ("num_steps", 0),
        ("log_interval", 0),
        ("checkpoint_interval", -3),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("gradient_clip_norm", float("inf")),
        ("weight_decay", -0.1),
        ("microbatch_size", 0),
        ("microbatch_size", 3),
        ("microbatch_size", 32),
        ("seed", -1),
        ("eos_id", -1),
        ("warmup_steps", -1),
        ("warmup_steps", 1000),
        ("max_positions", 255),
        ("masking", ""),
        ("masking", "span"),
    ],
)
def test_value_out_of_range(name, value):
    with pytest.raises(UsageError, match=rf"^config\.{name}={value!r}, expected .*--"):
        parse(**{name: value})


def test_limits_follow_the_other_keys():
    parse(num_steps=1001, warmup_steps=1000)
    parse(sequence_length=255, max_positions=255)


def test_unknown_key_gets_near_names():
    config = lm_config.make()
    config.num_step = 3
    with pytest.raises(UsageError, match="unknown: did you mean num_steps"):
        lm_config.parse(config)


# ml_collections loads config files by a deprecated function.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_valid(path):
    flag_values = config_flags.flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=flag_values)
    flag_values(["program", f"--config={path}"])
    assert not lm_config.parse(flag.value).out


def test_there_are_several_sizes_of_each_family():
    sizes = ("tiny", "small", "medium", "large")
    expected = {f"stdlib_{size}" for size in sizes} | {f"t5_{s}" for s in sizes[:3]}
    assert {path.stem for path in CONFIGS} >= expected
