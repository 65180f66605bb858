# Sourced by the scripts of the figures: the environment, and what they all do. The folder
# of the figure is $out.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run() { # BINARY FLAG...
  local binary=$1
  shift
  python -m "experiments.extraction.$binary" "$@"
}

config() { # NAME: the flag that takes this config
  echo "--config=experiments/extraction/configs/$1.py"
}

train() { # STEPS CORPUS CONFIG NAME: $out/NAME, trained on $out/CORPUS
  run train_lm "$(config "$3")" --config.corpus="tokens:$out/$2" --config.num_steps="$1" \
    --config.out="$out/$4"
}

folders() { # NAME...: the run folders, with commas between
  printf "$out/%s\n" "$@" | paste -sd, -
}

tokens_in() { # CORPUS: how many tokens $out/CORPUS holds
  python -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_tokens"])' \
    "$out/$1/manifest.json"
}
