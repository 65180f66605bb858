"""Reads finished sweeps and puts several together, if they are about the same thing."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
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
_COLUMNS = _FACTS | _DETAILS


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
class SweepRuns:
    """One or more sweeps over the same windows, as one.

    Attributes:
      sweeps: Which ones.
      models: In the order of the sweeps' configs.
      windows: The folder of the evaluation set, as the first sweep knew it.
      windows_sha256: Of its windows.parquet.
      num_windows: Number of windows that a sweep started from.
      precision: Of matrix products.
      suffix_length: Number of tokens that have to be reproduced.
      records: One row for each (model, window_id, context): the columns of
        records.parquet except what was generated, and `cluster` (i64).
    """

    sweeps: tuple[Sweep, ...]
    models: tuple[Model, ...]
    windows: str
    windows_sha256: str
    num_windows: int
    precision: str
    suffix_length: int
    records: pl.DataFrame


def load(folders: Sequence[pathlib.Path]) -> SweepRuns:
    """Reads the sweeps in `folders`, at least one.

    Raises:
      UsageError: A folder is not a sweep's or is named twice, or the sweeps differ in
        windows, precision, suffix length, in a model of one name, or in a result.
      RunError: A sweep has not ended, or its files are damaged.
    """
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise UsageError(f"--runs names {folder} twice: name it once")
    configs = {folder: _read_config(folder) for folder in folders}
    first = configs[folders[0]]
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
    for key, name in _COMPARED.items():
        value, other = config["derived"][key], other_config["derived"][key]
        if value != other:
            raise UsageError(
                f"--runs: {folder} and {other_folder} differ in {name}: {value!r} and "
                f"{other!r}: report them apart"
            )


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
    records = _read_parquet(path, _COLUMNS)
    _check_models(path, records, config["derived"]["models"])
    records = records.with_columns(pl.col("model").cast(names))
    records = records.join(clusters, on="window_id", how="left", maintain_order="left")
    _check_values(path, records, config["derived"]["suffix_length"])
    if records.select(_KEYS).is_duplicated().any():
        raise RunError(f"{path} holds a record twice: {_REMEDY}")
    return records


_REMEDY = "delete it and run the sweep again with the same config"


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_parquet(path: pathlib.Path, columns: dict[str, Any]) -> pl.DataFrame:
    try:
        return pl.read_parquet(path, columns=list(columns)).cast(pl.Schema(columns))
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
    path: pathlib.Path, records: pl.DataFrame, suffix_length: int
) -> None:
    """Raises `RunError` about the first record that contradicts itself."""
    extracted, correct = pl.col("extracted"), pl.col("tokens_correct")
    mismatch = pl.col("first_mismatch")
    faults = {
        "lacks a value": pl.any_horizontal(pl.col(*_FACTS).is_null()),
        f"has a window that {CLUSTERS} lacks": pl.col("cluster").is_null(),
        "has a margin that is no number (the model overflowed)": pl.col(
            "min_margin"
        ).is_nan(),
        "has a prompt and suffix longer than its window": (
            (pl.col("context") < 0)
            | (pl.col("context") + suffix_length > pl.col("length"))
        ),
        "has a count below 1": pl.col("count") < 1,
        "contradicts itself": (
            (extracted != (mismatch == suffix_length))
            | (extracted != (correct == suffix_length))
            | (mismatch < 0)
            | (mismatch > correct)
            | (correct > suffix_length)
        ),
    }
    for what, expression in faults.items():
        bad = records.filter(expression).head(1)
        if len(bad):
            row = bad.row(0, named=True)
            key = ", ".join(f"{name} {row[name]!r}" for name in _KEYS)
            raise RunError(f"{path}: the record of {key} {what}: {_REMEDY}")


def _merged(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """All records; one that several sweeps made is kept once.

    Where one sweep took verdicts only, the details are those of the other.
    """
    records = pl.concat(parts)
    if len(parts) == 1 or not records.select(_KEYS).is_duplicated().any():
        return records
    grouped = records.group_by(_KEYS, maintain_order=True)
    known = pl.all().drop_nulls()
    differing = grouped.agg(known.n_unique() > 1).filter(
        pl.any_horizontal(pl.exclude(_KEYS))
    )
    if len(differing):
        row = differing.row(0, named=True)
        key = ", ".join(f"{name} {row[name]!r}" for name in _KEYS)
        names = [name for name in records.columns if name not in _KEYS and row[name]]
        raise UsageError(
            f"--runs: {len(differing):,} records are in several sweeps with different "
            f"results; that of {key} differs in {', '.join(names)}: report them apart"
        )
    return grouped.agg(known.first()).select(records.columns)
