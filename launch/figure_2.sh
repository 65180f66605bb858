#!/usr/bin/env bash
# Figure 2 on the models of launch/figure_1.sh, which runs first where it has not: windows
# at random positions (2a, 2b), and beam search and matches anywhere in the corpus (2c).
# Repeated, the command goes on where it was stopped.
#
#   bash launch/figure_2.sh [SCALE [OUT [FIGURE_1]]]
#
# SCALE: stdlib (half an hour on two cores, the models apart; the default), or tiny (to see
# it run). OUT is runs/figure_2_SCALE, and FIGURE_1, the folder of launch/figure_1.sh,
# runs/figure_1_SCALE by default.
set -euo pipefail
. "$(dirname "$0")/extraction.sh"

scale=${1:-stdlib}
out=${2:-runs/figure_2_$scale}
models=${3:-runs/figure_1_$scale}

case $scale in
  stdlib)
    members="tiny small medium large" others="small large"
    windows=(--lengths=60,100,150,250 --num_windows=2000)
    searched=(--config.windows_per_bucket=40)
    ;;
  tiny)
    members="tiny small" others="tiny"
    windows=(--lengths=60,100 --num_windows=10)
    searched=(--config.windows_per_bucket=2 --config.beams=3)
    ;;
  *)
    echo "error: SCALE=$scale, expected stdlib or tiny" >&2
    exit 2
    ;;
esac

bash "$(dirname "$0")/figure_1.sh" "$scale" "$models"

run build_dataset --corpus="tokens:$models/member_corpus" --sample=uniform \
  "${windows[@]}" --out="$out/windows"
# shellcheck disable=SC2086
run sweep "$(config figure_2ab)" \
  --config.models="$(printf "$models/member_%s\n" $members | paste -sd, -)" \
  --config.baselines="$(printf "$models/other_%s\n" $others | paste -sd, -)" \
  --config.windows="$out/windows" --config.out="$out/sweep"
run report --runs="$out/sweep" --out="$out/report"

# Figure 2c: the largest model, on windows drawn by how often they occur.
run sweep "$(config figure_2c)" --config.models="$models/member_${members##* }" \
  --config.windows="$models/windows" --config.corpus="tokens:$models/member_corpus" \
  "${searched[@]}" --config.out="$out/sweep_figure_2c"
run report --runs="$out/sweep_figure_2c" --out="$out/report_figure_2c"
echo "Report folder: $out/report_figure_2c"
