"""Reads finished sweeps and puts several together, if they are about the same thing."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from experiments import run_folder
from experiments.errors import RunError, UsageError, one_line

RECORDS = "records.parquet"
CLUSTERS = "clusters.parquet"

# What identifies a record, and what it says of its window, its model and the verdict.
_KEYS = ("model", "window_id", "context")
_FACTS: dict[str, Any] = {
    "window_id": pl.Int64(),
    "model": pl.String(),
    "params": pl.Int64(),
    "length": pl.Int32(),
    "context": pl.Int32(),
    "count": pl.Int64(),
    "bucket": pl.Int32(),
    "extracted": pl.Boolean(),
}
# Null where the sweep took verdicts only.
_DETAILS: dict[str, Any] = {
    "first_mismatch": pl.Int32(),
    "tokens_correct": pl.Int32(),
    "min_margin": pl.Float32(),
    "tie": pl.Boolean(),
    "suffix_logprob": pl.Float32(),
}
# What a sweep may have measured besides, and older sweeps did not: null if not there.
_FURTHER: dict[str, Any] = {
    "whitespace": pl.Float32(),
    "entropy": pl.Float32(),
    "anywhere": pl.Boolean(),
    "bleu": pl.Float32(),
    "edit_distance": pl.Int32(),
    "beam_extracted": pl.Boolean(),
    "beam_logprob": pl.Float32(),
    "beam_identical": pl.Boolean(),
    "scheme_logprob": pl.Float32(),
    "samples_extracted": pl.Int32(),
    "num_targets": pl.Int32(),
}
COLUMNS = _FACTS | _DETAILS | _FURTHER
"""The columns of records, and their types; a record's `cluster` is i64."""

ROUNDING = 1e-3
"""By so much, times the value if that is above 1, two passes over one record differ at
most: batches of other sizes add up in another order. It is the logits' own rounding
(`queries.NEAR_TIE`), and more than that of the sum of 50 log-probabilities."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that was swept; a baseline has not seen the corpus in training."""

    name: str
    folder: str
    params: int
    baseline: bool


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One sweep: where it lies, as it was named, and the sha256 of its records."""

    folder: pathlib.Path
    records_sha256: str


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How continuations are drawn: the temperature, and from how many tokens."""

    temperature: float
    top_k: int | None

    def __str__(self) -> str:
        among = f", the {self.top_k} likeliest tokens" if self.top_k else ""
        return f"temperature {self.temperature:g}{among}"


@dataclasses.dataclass(frozen=True)
class SweepRuns:
    """One or more sweeps over the same windows, as one.

    Attributes:
      sweeps: Which ones.
      models: In the order of the sweeps' configs.
      windows: The folder of the evaluation set, as the first sweep knew it.
      windows_sha256: Of its windows.parquet.
      num_windows: Number of windows that a sweep started from.
      precision: Of matrix products.
      suffix_length: Number of tokens that have to be reproduced; None if blanks were
        filled in (see `masking`).
      records: One row for each (model, window_id, context): the columns of
        records.parquet except what was generated, and `cluster` (i64). Columns that no
        sweep has are null, but for `num_targets`: how many tokens a model had to
        reproduce.
      sample: How windows were chosen, "by_count" or "uniform"; None if not known.
      masking: How tokens were dropped, "iid" or "spans"; empty if prompts were
        continued.
      beams: Number of beams; 0 without beam search.
      scheme: What `scheme_logprob` and `samples_extracted` are about; None without.
      samples: How many continuations were drawn of each prompt.
    """

    sweeps: tuple[Sweep, ...]
    models: tuple[Model, ...]
    windows: str
    windows_sha256: str
    num_windows: int
    precision: str
    suffix_length: int | None
    records: pl.DataFrame
    sample: str | None = None
    masking: str = ""
    beams: int = 0
    scheme: Scheme | None = None
    samples: int = 0


def load(folders: Sequence[pathlib.Path]) -> SweepRuns:
    """Reads the sweeps in `folders`, at least one.

    Raises:
      UsageError: A folder is not a sweep's or is named twice, or the sweeps differ in
        what they ask of models, windows, precision, suffix length, beams, the way of
        drawing, in a model of one name, or in a result.
      RunError: A sweep has not ended, or its files are damaged.
    """
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise UsageError(f"--runs names {folder} twice: name it once")
    configs = {folder: _read_config(folder) for folder in folders}
    first = configs[folders[0]]
    settings = {name: _setting(configs, name) for name in _SETTINGS}
    for folder in folders[1:]:
        _check_comparable(folders[0], first, folder, configs[folder])
    models = _models(configs)
    names = pl.Enum([model.name for model in models])
    parts, num_windows = [], 0
    for folder, config in configs.items():
        clusters = _read_parquet(folder / CLUSTERS, _CLUSTER_COLUMNS)
        num_windows = max(num_windows, len(clusters))
        parts.append(_read_records(folder, config, names, clusters))
    derived = first["derived"]
    return SweepRuns(
        sweeps=tuple(Sweep(folder, _sha256(folder / RECORDS)) for folder in folders),
        models=models,
        windows=first["windows"],
        windows_sha256=derived["windows_sha256"],
        num_windows=num_windows,
        precision=derived["precision"],
        suffix_length=derived["suffix_length"],
        records=_merged(parts),
        sample=settings["sample"],
        masking=derived.get("masking") or "",
        beams=settings["beams"] or 0,
        scheme=settings["scheme"],
        samples=settings["samples"] or 0,
    )


def read_generated(runs: SweepRuns, prompts: pl.DataFrame) -> pl.DataFrame:
    """What greedy decoding gave for some prompts, where a sweep decoded.

    Args:
      runs: The sweeps.
      prompts: The columns window_id and context say which.

    Returns:
      model, window_id, context, generated (list<u32>); each key once.

    Raises:
      RunError: A record does not hold as many tokens as a suffix has.
    """
    columns = {name: runs.records.schema[name] for name in _KEYS} | _GENERATED
    parts = [pl.DataFrame(schema=columns)]
    for sweep in runs.sweeps:
        path = sweep.folder / RECORDS
        if "generated" not in pl.read_parquet_schema(path):
            continue
        rows = (
            pl.scan_parquet(path)
            .filter(pl.col("window_id").is_in(prompts["window_id"].unique().to_list()))
            .select(list(columns))
            .drop_nulls("generated")
            .collect()
            .cast(pl.Schema(columns))
        )
        lengths = rows["generated"].list.len()
        if (lengths != runs.suffix_length).any():
            raise RunError(
                f"{path} holds a continuation of other than {runs.suffix_length} "
                f"tokens: {_REMEDY}"
            )
        parts.append(rows.join(prompts, on=["window_id", "context"], how="semi"))
    return pl.concat(parts).unique(_KEYS, keep="first", maintain_order=True)


_GENERATED: dict[str, Any] = {"generated": pl.List(pl.UInt32())}
_CLUSTER_COLUMNS: dict[str, Any] = {"window_id": pl.Int64(), "cluster": pl.Int64()}
_COMPARED = {
    "windows_sha256": "windows (windows_sha256)",
    "precision": "precision",
    "suffix_length": "suffix length",
}


def _sample(config: dict[str, Any]) -> str | None:
    return config["derived"].get("sample")


def _beams(config: dict[str, Any]) -> int | None:
    return config.get("beams") or None


def _samples(config: dict[str, Any]) -> int | None:
    return config.get("samples") or None


def _scheme(config: dict[str, Any]) -> Scheme | None:
    scheme = Scheme(float(config.get("temperature", 1.0)), config.get("top_k"))
    plain = scheme == Scheme(1.0, None)
    return None if plain and not _samples(config) else scheme


# What must be the same in all sweeps that have it.
_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sample": _sample,
    "beams": _beams,
    "scheme": _scheme,
    "samples": _samples,
}
_MODEL_KEYS = ("model", "folder", "params", "baseline")


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / run_folder.CONFIG
    if not path.is_file():
        raise UsageError(
            f"--runs: {folder} holds no {run_folder.CONFIG}: give folders that "
            "experiments.extraction.sweep wrote"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise RunError(
            f"{path} is damaged ({one_line(error)}): sweep again into another folder"
        ) from error
    derived = config.get("derived") if isinstance(config, dict) else None
    complete = (
        isinstance(derived, dict)
        and "windows" in config
        and all(key in derived for key in _COMPARED)
        and isinstance(derived.get("models"), list)
        and all(
            isinstance(model, dict) and all(key in model for key in _MODEL_KEYS)
            for model in derived["models"]
        )
    )
    if not complete:
        raise UsageError(
            f"--runs: {path} is not the config of a sweep: give folders that "
            "experiments.extraction.sweep wrote"
        )
    return config


def _check_comparable(
    folder: pathlib.Path,
    config: dict[str, Any],
    other_folder: pathlib.Path,
    other_config: dict[str, Any],
) -> None:
    """Raises `UsageError` if the sweeps measured different things."""
    asked, other_asked = _question(config), _question(other_config)
    if asked != other_asked:
        raise UsageError(
            f"--runs: {folder} asked models to {asked}, and {other_folder} to "
            f"{other_asked}: report them apart"
        )
    for key, name in _COMPARED.items():
        value, other = config["derived"][key], other_config["derived"][key]
        if value != other:
            raise UsageError(
                f"--runs: {folder} and {other_folder} differ in {name}: {value!r} and "
                f"{other!r}: report them apart"
            )


def _question(config: dict[str, Any]) -> str:
    masking = config["derived"].get("masking")
    if not masking:
        return "continue prompts"
    # The seed says which tokens are dropped.
    return f"fill blanks (masking {masking!r}, seed {config.get('seed')})"


def _setting(configs: dict[pathlib.Path, dict[str, Any]], name: str) -> Any:
    """What all sweeps that have the setting have; None if none does."""
    known = {
        folder: value
        for folder, config in configs.items()
        if (value := _SETTINGS[name](config)) is not None
    }
    first, *others = known.items() or [(None, None)]
    for folder, value in others:
        if value != first[1]:
            raise UsageError(
                f"--runs: {first[0]} and {folder} differ in {name}: {first[1]} and "
                f"{value}: report them apart"
            )
    return first[1]


def _models(configs: dict[pathlib.Path, dict[str, Any]]) -> tuple[Model, ...]:
    """All models, each once; one name must mean one model."""
    seen: dict[str, tuple[pathlib.Path, dict[str, Any]]] = {}
    for folder, config in configs.items():
        for entry in config["derived"]["models"]:
            where, known = seen.setdefault(entry["model"], (folder, entry))
            # The same model may have been copied, but its weights are the same.
            keys = [k for k in known.keys() | entry.keys() if k != "folder"]
            differing = sorted(k for k in keys if known.get(k) != entry.get(k))
            if differing:
                raise UsageError(
                    f"--runs: {where} and {folder} call two models "
                    f"{entry['model']!r}, which differ in {', '.join(differing)}: "
                    "rename the folder of one and sweep it again, or report them apart"
                )
    return tuple(
        Model(name, entry["folder"], entry["params"], entry["baseline"])
        for name, (_, entry) in seen.items()
    )


def _read_records(
    folder: pathlib.Path, config: dict[str, Any], names: pl.Enum, clusters: pl.DataFrame
) -> pl.DataFrame:
    path = folder / RECORDS
    if not path.is_file():
        raise RunError(
            f"{folder} holds no {RECORDS}: the sweep has not ended; run it again with "
            "the same config to its end"
        )
    records = _read_parquet(path, _FACTS | _DETAILS, _FURTHER)
    _check_models(path, records, config["derived"]["models"])
    records = records.with_columns(pl.col("model").cast(names))
    records = records.join(clusters, on="window_id", how="left", maintain_order="left")
    suffix_length = config["derived"]["suffix_length"]
    if suffix_length is not None:
        records = records.with_columns(
            pl.lit(suffix_length, pl.Int32).alias("num_targets")
        )
    _check_values(path, records, suffix_length)
    if records.select(_KEYS).is_duplicated().any():
        raise RunError(f"{path} holds a record twice: {_REMEDY}")
    return records


_REMEDY = "delete it and run the sweep again with the same config"


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_parquet(
    path: pathlib.Path, columns: dict[str, Any], further: dict[str, Any] | None = None
) -> pl.DataFrame:
    """Reads columns; those of `further` that the file lacks become null."""
    further = further or {}
    try:
        there = pl.read_parquet_schema(path)
        names = [*columns, *(name for name in further if name in there)]
        missing = [pl.lit(None).alias(name) for name in further if name not in there]
        rows = pl.read_parquet(path, columns=names).with_columns(missing)
        return rows.select(*columns, *further).cast(pl.Schema(columns | further))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RunError(
            f"{path} cannot be read ({one_line(error, 200)}): {_REMEDY}"
        ) from error


def _check_models(
    path: pathlib.Path, records: pl.DataFrame, models: list[dict[str, Any]]
) -> None:
    """Every model has as many records as any other, with the parameters it has."""
    found = {
        name: (rows, params)
        for name, rows, params in records.group_by("model")
        .agg(pl.len(), pl.col("params").unique())
        .iter_rows()
    }
    unknown = sorted(found.keys() - {model["model"] for model in models})
    if unknown:
        raise RunError(
            f"{path} holds records of {unknown[0]!r}, which {run_folder.CONFIG} does "
            f"not name: {_REMEDY}"
        )
    most = max((rows for rows, _ in found.values()), default=0)
    if most == 0:
        raise RunError(
            f"{path} holds no record: no window is long enough for a context; build "
            "longer windows or give shorter --config.contexts"
        )
    for model in models:
        rows, params = found.get(model["model"], (0, [model["params"]]))
        if rows != most:
            raise RunError(
                f"{path} holds {rows:,} records of {model['model']!r} and {most:,} of "
                f"another model, so some are missing: {_REMEDY}"
            )
        if params != [model["params"]]:
            raise RunError(
                f"{path} gives {model['model']!r} {params} parameters, "
                f"{run_folder.CONFIG} {model['params']}: {_REMEDY}"
            )


def _check_values(
    path: pathlib.Path, records: pl.DataFrame, suffix_length: int | None
) -> None:
    """Raises `RunError` about the first record that contradicts itself.

    Raises a `UsageError` if there are no counts to report by.
    """
    if records["count"].has_nulls():
        raise UsageError(
            f"--runs: {path} is about windows of which it is not known how often they "
            "occur: make the evaluation set again with the count of each (convert "
            "takes --corpus=tokens:DIR), and sweep it into another folder"
        )
    extracted, correct = pl.col("extracted"), pl.col("tokens_correct")
    mismatch, targets = pl.col("first_mismatch"), pl.col("num_targets")
    too_long = pl.col("context") + (suffix_length or 0) > pl.col("length")
    floats = [name for name, kind in COLUMNS.items() if kind == pl.Float32()]
    faults = {
        "lacks a value": pl.any_horizontal(pl.col(*_FACTS, "num_targets").is_null()),
        f"has a window that {CLUSTERS} lacks": pl.col("cluster").is_null(),
        "has a margin that is no number (the model overflowed)": pl.col(
            "min_margin"
        ).is_nan(),
        "has a value that is no number": pl.any_horizontal(pl.col(floats).is_nan()),
        "has a prompt and suffix longer than its window": (
            (pl.col("context") < 0) | too_long
        ),
        "has a count below 1": pl.col("count") < 1,
        "contradicts itself": (
            (extracted != (mismatch == targets))
            | (extracted != (correct == targets))
            | (mismatch < 0)
            | (mismatch > correct)
            | (correct > targets)
        ),
        "is extracted, and yet not found anywhere in the corpus": (
            extracted & ~pl.col("anywhere")
        ),
        "has a share outside 0 to 1": pl.any_horizontal(
            (pl.col("whitespace", "bleu") < 0) | (pl.col("whitespace", "bleu") > 1)
        ),
        "has a distance longer than a suffix": (
            (pl.col("edit_distance") < 0) | (pl.col("edit_distance") > targets)
        ),
    }
    for what, expression in faults.items():
        bad = records.filter(expression).head(1)
        if len(bad):
            row = bad.row(0, named=True)
            key = ", ".join(f"{name} {row[name]!r}" for name in _KEYS)
            raise RunError(f"{path}: the record of {key} {what}: {_REMEDY}")


def _merged(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """All records; one that several sweeps made is kept once, as the first has it.

    Where one sweep did not measure something, it is taken from the other. Numbers may
    differ by `ROUNDING`; verdicts and counts of tokens must not.
    """
    records = pl.concat(parts)
    if len(parts) == 1 or not records.select(_KEYS).is_duplicated().any():
        return records
    grouped = records.group_by(_KEYS, maintain_order=True)
    kinds = {name: kind for name, kind in records.schema.items() if name not in _KEYS}
    differs = [
        _by_more_than_rounding(name)
        if kind == pl.Float32()
        else pl.col(name).drop_nulls().n_unique() > 1
        for name, kind in kinds.items()
    ]
    differing = grouped.agg(differs).filter(pl.any_horizontal(pl.col(*kinds)))
    if len(differing):
        row = differing.row(0, named=True)
        key = ", ".join(f"{name} {row[name]!r}" for name in _KEYS)
        names = [name for name in kinds if row[name]]
        raise UsageError(
            f"--runs: {len(differing):,} records are in several sweeps with different "
            f"results; that of {key} differs in {', '.join(names)}: report them apart"
        )
    return grouped.agg(pl.all().drop_nulls().first()).select(records.columns)


def _by_more_than_rounding(name: str) -> pl.Expr:
    """Whether the values of a group differ by more than `ROUNDING`."""
    low, high = pl.col(name).min(), pl.col(name).max()
    # By the smaller one, as an infinity is near to no number.
    size = pl.max_horizontal(pl.min_horizontal(low.abs(), high.abs()), 1.0)
    return ((low != high) & (high - low > ROUNDING * size)).fill_null(False)
