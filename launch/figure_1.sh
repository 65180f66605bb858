#!/usr/bin/env bash
# From the standard library's sources to Figures 1, 3, 5 to 13 and Table 1: corpora with
# planted repeats, an evaluation set, models that saw the corpus and models that did not,
# the sweep, the report. Repeated, the command goes on where it was stopped.
#
#   bash launch/figure_1.sh [SCALE [OUT]]
#
# SCALE: stdlib (four sizes, an hour or more on two busy cores; the default), quickstart (two
# sizes, four minutes), or tiny (to see it run). OUT is runs/figure_1_SCALE by default.
set -euo pipefail
. "$(dirname "$0")/extraction.sh"

scale=${1:-stdlib}
out=${2:-runs/figure_1_$scale}

case $scale in
  stdlib)
    members="tiny small medium large" others="small large" steps=1000
    corpus=(--max_tokens=100000 --plant_passages=24 --plant_tokens=300)
    windows=(--lengths=60,75,100,150,250 --per_bucket=500) contexts=10,25,50,100,200
    ;;
  quickstart)
    members="tiny small" others="small" steps=600
    corpus=(--max_tokens=50000 --plant_passages=8 --plant_tokens=250)
    windows=(--lengths=60,100,200 --per_bucket=200) contexts=10,50,150
    ;;
  tiny)
    members="tiny small" others="tiny" steps=2
    corpus=(--max_tokens=4000 --plant_passages=1 --plant_tokens=150)
    windows=(--lengths=60,100 --per_bucket=10) contexts=10,50
    ;;
  *)
    echo "error: SCALE=$scale, expected stdlib, quickstart or tiny" >&2
    exit 2
    ;;
esac

# Members of the training set, with passages planted 1 to 32 times that occur nowhere
# else, and documents that no member has seen.
run build_corpus --corpus=stdlib --tokenizer=bpe:2048 --part=0/3 --plant_from=2/3 \
  --plant_counts=1,2,4,8,16,32 "${corpus[@]}" --out="$out/member_corpus"
run build_corpus --corpus=stdlib --tokenizer="$out/member_corpus" --part=1/3 \
  --max_tokens=300000 --out="$out/other_corpus"
run build_dataset --corpus="tokens:$out/member_corpus" "${windows[@]}" --out="$out/windows"

for name in $members; do train "$steps" member_corpus "stdlib_$name" "member_$name"; done
for name in $others; do train "$steps" other_corpus "stdlib_$name" "other_$name"; done

# shellcheck disable=SC2086
run sweep "$(config figure_1)" \
  --config.models="$(folders $(printf 'member_%s ' $members))" \
  --config.baselines="$(folders $(printf 'other_%s ' $others))" \
  --config.windows="$out/windows" --config.decode=True \
  --config.corpus="tokens:$out/member_corpus" --config.out="$out/sweep"
run report --runs="$out/sweep" --out="$out/report"

# Figure 5: the largest model, prompted with the start of longer windows.
run sweep "$(config figure_5)" --config.models="$out/member_${members##* }" \
  --config.windows="$out/windows" --config.contexts="$contexts" \
  --config.out="$out/sweep_figure_5"
run report --runs="$out/sweep_figure_5" --out="$out/report_figure_5"
echo "Report folder: $out/report"
