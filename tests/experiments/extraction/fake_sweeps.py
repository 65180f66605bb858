"""Folders that look as a sweep leaves them, without a model or a corpus.

Windows lie in clusters (repeated passages); a passage has a difficulty of its own, so
its windows are extracted together more often than not. A model extracts a window if its
ability, which rises with the logarithms of parameters, repetitions and context, exceeds
the window's difficulty; a baseline's ability hardly rises. Every model sees the same
windows with the same difficulties.

Windows are numbers alone, unless `write_windows` makes an evaluation set of a text;
continuations are there if a sweep is written with its tokens. What a sweep measures
besides (`with_beams`, `with_anywhere`, ...) follows from the margins alone.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from experiments.extraction import byte_pairs, evaluation_set, sweep_runs

SUFFIX_LENGTH = 50
MEMBERS = {"tiny": 120_000, "small": 450_000, "medium": 1_100_000, "large": 3_600_000}
BASELINES = {"other-small": 450_000, "other-large": 3_600_000}


@dataclasses.dataclass(frozen=True)
class Windows:
    """What a fake evaluation set holds, one entry per window."""

    window_id: np.ndarray
    length: np.ndarray
    bucket: np.ndarray
    count: np.ndarray
    cluster: np.ndarray
    difficulty: np.ndarray


def make_windows(
    lengths: Sequence[int] = (100, 200, 500),
    buckets: Sequence[int] = (0, 4, 8, 12),
    per_bucket: int = 40,
    per_cluster: int = 4,
    seed: int = 0,
) -> Windows:
    """`per_bucket` windows in each length and bucket 2^(n/4), in passages."""
    rng = np.random.default_rng(seed)
    grid = np.array([(le, b) for le in lengths for b in buckets]).repeat(per_bucket, 0)
    length, bucket = grid.T
    low, high = 2 ** (bucket / 4), 2 ** ((bucket + 1) / 4)
    count = np.ceil(low + (np.ceil(high) - np.ceil(low)) * rng.random(len(low)) * 0.999)
    count = np.maximum(count - 1, np.ceil(low)).astype(np.int64)
    num_clusters = max(1, len(length) // per_cluster)
    cluster = rng.integers(num_clusters, size=len(length))
    passage = rng.normal(size=num_clusters)
    difficulty = 0.8 * passage[cluster] + 0.6 * rng.normal(size=len(length))
    # Positions in a corpus, as real clusters are.
    position = 1000 * rng.permutation(num_clusters)
    ids = np.arange(len(length))
    return Windows(ids, length, bucket, count, position[cluster], difficulty)


def make_records(
    windows: Windows,
    name: str,
    params: int,
    baseline: bool,
    contexts: Sequence[int] = (),
    ability: float = 0.0,
) -> pl.DataFrame:
    """All records of one model; no contexts means the full one of each window."""
    parts = []
    for context in contexts or (None,):
        k = windows.length - SUFFIX_LENGTH if context is None else context
        k = np.broadcast_to(k, windows.length.shape)
        fits = (k > 0) & (k + SUFFIX_LENGTH <= windows.length)
        parts.append((np.flatnonzero(fits), k[fits]))
    rows, context = (np.concatenate(part) for part in zip(*parts, strict=True))
    size, repeats = np.log10(params / 1e6), np.log10(windows.count[rows])
    strength = (
        -2.6 + 0.1 * size + 0.3 * repeats
        if baseline
        else -1.9 + 0.9 * size + 1.1 * repeats + 0.5 * np.log10(context / 100)
    )
    margin = (strength + ability - windows.difficulty[rows]).astype(np.float32)
    extracted = margin >= 0
    # A window that is far from extracted has its first wrong token early.
    mismatch = np.floor(SUFFIX_LENGTH * np.exp(np.minimum(margin, -0.02)))
    mismatch = np.where(extracted, SUFFIX_LENGTH, mismatch).astype(np.int32)
    correct = mismatch + (SUFFIX_LENGTH - 1 - mismatch) * 2 // 3
    return pl.DataFrame(
        {
            "window_id": windows.window_id[rows],
            "model": name,
            "params": np.full(len(rows), params, np.int64),
            "length": windows.length[rows].astype(np.int32),
            "context": context.astype(np.int32),
            "count": windows.count[rows],
            "bucket": windows.bucket[rows].astype(np.int32),
            "extracted": extracted,
            "first_mismatch": mismatch,
            "tokens_correct": np.where(extracted, SUFFIX_LENGTH, correct).astype(
                np.int32
            ),
            "min_margin": margin,
            "tie": margin == 0,
            "suffix_logprob": (-np.exp(-margin)).astype(np.float32),
        }
    ).sort("context", "length", "window_id")


def write_windows(
    folder: pathlib.Path, windows: Windows, text: str, vocabulary_size: int = 400
) -> pl.DataFrame:
    """Writes an evaluation set whose windows are pieces of `text`, over and over.

    Returns:
      The rows of windows.parquet.
    """
    folder.mkdir(parents=True)
    tokenizer = byte_pairs.train([text], vocabulary_size)
    tokenizer.save(str(folder.parent / "tokenizer.json"))
    (ids_N,) = byte_pairs.encode(tokenizer, [text], byte_pairs.TRAINED_EOS_ID)
    parts = []
    for length in np.unique(windows.length):
        of_length = windows.length == length
        starts = windows.window_id[of_length] * 7
        places = (starts[:, None] + np.arange(length)) % len(ids_N)
        parts.append(
            evaluation_set.rows(
                ids_N[places],
                bucket_K=windows.bucket[of_length],
                count_K=windows.count[of_length],
                position_K=windows.cluster[of_length],
                cluster_K=windows.cluster[of_length],
            )
        )
    evaluation_set.write(
        folder, parts, {"buckets": []}, folder.parent / "tokenizer.json"
    )
    return evaluation_set.load(folder).windows


def with_continuations(records: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Adds `generated`: the truth up to the first mismatch, then mostly other tokens.

    Args:
      records: As `make_records` has them.
      windows: As `write_windows` has them.
    """
    tokens = dict(windows.select("window_id", "tokens").iter_rows())
    generated = []
    for window_id, context, mismatch in records.select(
        "window_id", "context", "first_mismatch"
    ).iter_rows():
        truth = tokens[window_id][context : context + SUFFIX_LENGTH]
        others = [i + 1 if k % 3 == 0 else i for k, i in enumerate(truth[mismatch:])]
        generated.append(truth[:mismatch] + others)
    column = pl.Series("generated", generated, pl.List(pl.UInt32))
    return records.with_columns(column)


def with_plainness(records: pl.DataFrame) -> pl.DataFrame:
    """Adds `whitespace` and `entropy`, which go against each other."""
    share = (pl.col("window_id") % 10 / 20).cast(pl.Float32)
    return records.with_columns(whitespace=share, entropy=6 - 8 * share)


def with_near_misses(records: pl.DataFrame) -> pl.DataFrame:
    """Adds `bleu` and `edit_distance`: as many errors as tokens are wrong."""
    wrong = SUFFIX_LENGTH - pl.col("tokens_correct")
    return records.with_columns(
        bleu=(1 - wrong / SUFFIX_LENGTH).cast(pl.Float32) ** 2, edit_distance=wrong
    )


def with_anywhere(records: pl.DataFrame) -> pl.DataFrame:
    """Adds `anywhere`: true of more windows the more often they occur."""
    found = pl.col("min_margin") >= -0.3 * pl.col("count").log1p()
    return records.with_columns(anywhere=pl.col("extracted") | found)


def with_beams(records: pl.DataFrame) -> pl.DataFrame:
    """Adds what beam search gives: a little more is extracted, and a little less."""
    margin, odd = pl.col("min_margin"), pl.col("window_id") % 2 == 1
    extracted = pl.when(odd).then(margin >= -0.2).otherwise(margin >= 0.05)
    return records.with_columns(
        beam_extracted=extracted,
        beam_logprob=pl.col("suffix_logprob") * 0.9,
        beam_identical=odd & (pl.col("extracted") == extracted),
    )


def with_scheme(samples: int = 0) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Adds `scheme_logprob`, and `samples_extracted` if there are samples."""

    def add(records: pl.DataFrame) -> pl.DataFrame:
        logprob = 0.5 * pl.col("suffix_logprob")
        drawn = (samples * logprob.exp()).round().cast(pl.Int32)
        columns = {"scheme_logprob": logprob}
        return records.with_columns(
            **columns, **({"samples_extracted": drawn} if samples else {})
        )

    return add


def with_masking(records: pl.DataFrame) -> pl.DataFrame:
    """The same verdicts on windows of which 15 % are dropped and have to be filled in.

    For sweeps with masking="iid" and suffix_length=None.
    """
    dropped = (0.15 * pl.col("length")).round().cast(pl.Int32)
    # Most blanks are one token, and come with a sentinel.
    targets = dropped * 2 - dropped // 4
    scaled = {
        name: pl.col(name) * targets // SUFFIX_LENGTH
        for name in ("first_mismatch", "tokens_correct")
    }
    return records.with_columns(
        context=pl.col("length") - dropped, num_targets=targets, **scaled
    )


def config_of(
    members: dict[str, int],
    baselines: dict[str, int],
    contexts: Sequence[int] = (),
    folder: str = "data/windows",
    config: dict[str, Any] | None = None,
    **derived: Any,
) -> dict[str, Any]:
    """The config.json of a sweep over these models (name: parameters).

    `config` has more of its keys, and `derived` more of what it derives.
    """
    models = [
        {
            "model": name,
            "folder": f"runs/{name}",
            "params": params,
            "baseline": baseline,
            "sha256": f"weights of {name}",
        }
        for group, baseline in ((members, False), (baselines, True))
        for name, params in group.items()
    ]
    return {
        "windows": folder,
        "contexts": list(contexts),
        "batch_size": 32,
        **(config or {}),
        "derived": {
            "windows_sha256": "5e1f",
            "precision": "highest",
            "suffix_length": SUFFIX_LENGTH,
            "models": models,
            **derived,
        },
    }


def runs_of(
    columns: dict[str, Sequence[Any]],
    members: dict[str, int] | None = None,
    baselines: dict[str, int] | None = None,
    **settings: Any,
) -> sweep_runs.SweepRuns:
    """What is read of a sweep with these records, and no files.

    Unless `columns` have it otherwise, each window is a cluster of its own, is 100
    tokens long and prompted by 50, occurs as often as the lowest count of its bucket,
    and was put to the first model. `settings` are attributes of the runs.
    """
    members = {"model": 1_000_000} if members is None else members
    models = tuple(
        sweep_runs.Model(name, f"runs/{name}", params, baseline)
        for group, baseline in ((members, False), (baselines or {}, True))
        for name, params in group.items()
    )
    params = {model.name: model.params for model in models}
    size = max(map(len, columns.values()))
    rows = pl.DataFrame(
        {
            "window_id": range(size),
            "model": [models[0].name] * size,
            "bucket": [0] * size,
            "cluster": range(size),
            **columns,
        }
    )
    count = np.ceil(2 ** (rows["bucket"].to_numpy() / 4) - 1e-9).astype(np.int64)
    defaults = {
        "params": rows["model"].replace_strict(params),
        "length": pl.lit(100),
        "context": pl.lit(50),
        "count": pl.Series(count),
        "extracted": pl.lit(False),
        "num_targets": pl.lit(SUFFIX_LENGTH),
    }
    kinds = {**sweep_runs.COLUMNS, "cluster": pl.Int64()}
    kinds["model"] = pl.Enum([model.name for model in models])
    missing = {
        name: defaults.get(name, pl.lit(None))
        for name in kinds
        if name not in rows.columns
    }
    return sweep_runs.SweepRuns(
        **{
            "sweeps": (sweep_runs.Sweep(pathlib.Path("sweep"), "7a"),),
            "models": models,
            "windows": "data/windows",
            "windows_sha256": "5e1f",
            "num_windows": rows["window_id"].n_unique(),
            "precision": "highest",
            "suffix_length": SUFFIX_LENGTH,
            "records": rows.with_columns(**missing).select(*kinds).cast(kinds),
            **settings,
        }
    )


def write(
    folder: pathlib.Path,
    windows: Windows,
    members: dict[str, int] = MEMBERS,
    baselines: dict[str, int] = BASELINES,
    contexts: Sequence[int] = (),
    verdicts_only: bool = False,
    text: str = "",
    further: Sequence[Callable[[pl.DataFrame], pl.DataFrame]] = (),
    config: dict[str, Any] | None = None,
    **derived: Any,
) -> pathlib.Path:
    """Writes config.json, records.parquet and clusters.parquet of a finished sweep.

    With `text` the sweep has decoded, and an evaluation set lies in its folder.
    `further` is what else is done to the records, such as `with_beams`; `config` has
    the keys that go with it, and `derived` what it derives.
    """
    folder.mkdir(parents=True)
    where = "data/windows"
    if text:
        where = str(folder / "windows")
        rows = write_windows(folder / "windows", windows, text)
        derived["windows_sha256"] = evaluation_set.load(where).sha256
    whole = config_of(members, baselines, contexts, where, config, **derived)
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    records = pl.concat(
        make_records(windows, name, params, baseline, contexts)
        for group, baseline in ((members, False), (baselines, True))
        for name, params in group.items()
    )
    if text:
        records = with_continuations(records, rows)
    for change in further:
        records = change(records)
    if verdicts_only:
        details = records.columns[records.columns.index("extracted") + 1 :]
        details = [name for name in details if name != "generated"]
        records = records.with_columns(
            pl.lit(None, records.schema[name]).alias(name) for name in details
        )
    records.write_parquet(folder / "records.parquet")
    pl.DataFrame(
        {"window_id": windows.window_id, "cluster": windows.cluster}
    ).write_parquet(folder / "clusters.parquet")
    return folder
