#!/usr/bin/env bash
# Figure 4: encoder-decoders that fill blanks (4a, 4b), and decoders of one size trained on
# a corpus, on the same without near-duplicate documents, and on the same without repeated
# substrings (4c), each for as many epochs. Repeated, the command goes on where it was
# stopped.
#
#   bash launch/figure_4.sh [SCALE [OUT]]
#
# SCALE: stdlib (an hour on two cores; the default), or tiny (to see it run). OUT is
# runs/figure_4_SCALE by default.
set -euo pipefail
. "$(dirname "$0")/extraction.sh"

scale=${1:-stdlib}
out=${2:-runs/figure_4_$scale}

case $scale in
  stdlib)
    decoder=medium decoder_steps=1000
    t5="tiny small medium" t5_steps=4000
    corpus=(--max_tokens=250000 --plant_passages=24 --plant_tokens=150)
    windows=(--lengths=60,80,100,120 --per_bucket=300)
    blanks_corpus=(--max_tokens=20000 --plant_passages=8 --plant_tokens=120)
    blanks_windows=(--lengths=60,80,100 --per_bucket=200)
    ;;
  tiny)
    decoder=tiny decoder_steps=2
    t5="tiny small" t5_steps=2
    corpus=(--max_tokens=4000 --plant_passages=1 --plant_tokens=150)
    windows=(--lengths=60,100 --per_bucket=5)
    blanks_corpus=("${corpus[@]}") blanks_windows=("${windows[@]}")
    ;;
  *)
    echo "error: SCALE=$scale, expected stdlib or tiny" >&2
    exit 2
    ;;
esac

planted=(--corpus=stdlib --part=0/3 --plant_from=2/3 --plant_counts=1,2,4,8,16,32)

# 4c: models of one size.
run build_corpus "${planted[@]}" --tokenizer=bpe:2048 "${corpus[@]}" \
  --out="$out/original_corpus"
for method in near exact; do
  run deduplicate --corpus="tokens:$out/original_corpus" --method="$method" \
    --out="$out/${method}_corpus"
done
# Counts are those of the original corpus, whatever a model was trained on.
run build_dataset --corpus="tokens:$out/original_corpus" "${windows[@]}" \
  --out="$out/windows"

total=$(tokens_in original_corpus)
for name in original near exact; do
  steps=$((decoder_steps * $(tokens_in "${name}_corpus") / total))
  train "$((steps > 0 ? steps : 1))" "${name}_corpus" "stdlib_$decoder" "$name"
done
run sweep "$(config figure_4c)" --config.models="$(folders original near exact)" \
  --config.windows="$out/windows" --config.out="$out/sweep_figure_4c"
run report --runs="$out/sweep_figure_4c" --out="$out/report_figure_4c"

# 4a and 4b: encoder-decoders. A visit teaches them 15 % of the tokens, so that their corpus
# is smaller, and visited the more often.
run build_corpus "${planted[@]}" --tokenizer="$out/original_corpus" "${blanks_corpus[@]}" \
  --out="$out/blanks_corpus"
run build_dataset --corpus="tokens:$out/blanks_corpus" "${blanks_windows[@]}" \
  --out="$out/blanks_windows"
for name in $t5; do train "$t5_steps" blanks_corpus "t5_$name" "t5_$name"; done
# shellcheck disable=SC2086
run sweep "$(config figure_4ab)" --config.models="$(folders $(printf 't5_%s ' $t5))" \
  --config.windows="$out/blanks_windows" --config.out="$out/sweep"
run report --runs="$out/sweep" --out="$out/report"
echo "Report folder: $out/report"
