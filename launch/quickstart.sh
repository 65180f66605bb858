#!/usr/bin/env bash
# A fresh machine to a first private model, and to the first figures of what language
# models memorise. Arguments go to the two binaries of private training, such as
# --config.epsilon=1; each private run makes a new folder under runs/. FIGURE_1_SCALE and
# FIGURE_1_OUT are the arguments of launch/figure_1.sh.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

config=experiments/dp/configs/digits_mlp.py
python -m experiments.dp.step_time --config="$config" "$@"
python -m experiments.dp.train --config="$config" "$@"
bash launch/figure_1.sh "${FIGURE_1_SCALE:-quickstart}" "${FIGURE_1_OUT:-}"
