#!/usr/bin/env bash
# How the models in dcar/assets were made, on two CPU cores (docs/experiments.md has times and results).
# Each command is one that a user runs on a corpus of their own. Usage: ./launch/make_starter_models.sh runs/starter
set -euo pipefail
. "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
out=${1:-runs/starter}
recipes=launch/recipes

dcar fit-tokenizer output="$out/tokenizer" vocab_size=512 max_frames=120000
dcar prepare out_dir="$out/prepared" tokenizer="$out/tokenizer"

# Vocoder: mel and pitch losses only; the adversarial part needs a GPU (a step with it takes 10 to 20 s on a CPU).
python -m dcar.vocoder_data --prepared "$out/prepared" --out "$out/vocoder.safetensors"
dcar train-vocoder --data "$out/vocoder.safetensors" --out "$out/vocoder" --max_minutes 24 --batch_size 12 \
  --pitch_batch_size 8 --pitch_tokens 200 --warm_steps 1000000 --learning_rate 8e-4 --eval_every 500 \
  --vocoder '{"vocab_size":512}'

# Stage one, the quickstart's recipes run longer.
dcar train --config $recipes/car_starter.yaml data="$out/prepared" out_dir="$out/car" max_steps=1000
dcar train --config $recipes/far_starter.yaml data="$out/prepared" out_dir="$out/far" max_steps=1000

# The reward recogniser hears what the vocoder makes of the corpus' own tokens.
for split in train dev; do
  dcar resynthesize data="$out/prepared" split=$split vocoder="$out/vocoder/export" out="$out/resynthesis"
done
dcar train-recognizer train_manifest="$out/resynthesis/train.jsonl" dev_manifest="$out/resynthesis/dev.jsonl" \
  output="$out/recognizer/starter.nemo" max_minutes=20 batch_seconds=60 bf16=true

dcar profile --config $recipes/profile_starter.yaml base="$out/car" data="$out/prepared" out="$out/profile"
dcar train-policy --config $recipes/dcpo_starter.yaml base="$out/car" data="$out/prepared" \
  guidance="$out/profile/profile.json" output_dir="$out/dcpo"
dcar export run="$out/dcpo" base="$out/car" out="$out/policy"
