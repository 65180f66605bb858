#!/usr/bin/env bash
# A fresh machine to a first private model. Arguments go to the two binaries, such as
# --config.epsilon=1. Each run makes a new folder under runs/.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

config=experiments/dp/configs/digits_mlp.py
python -m experiments.dp.step_time --config="$config" "$@"
python -m experiments.dp.train --config="$config" "$@"
