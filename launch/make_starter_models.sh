#!/usr/bin/env bash
# How the models in dcar/assets were made, on two CPU cores (docs/experiments.md has times and results).
# The shipped tokenizer, decoders, policy and recogniser come from an earlier state of this script: the tokenizer without
# projection_size, which docs/experiments.md found to be better since. Each command is one that a user runs on a corpus of
# their own. Usage: ./launch/make_starter_models.sh runs/starter
set -euo pipefail
. "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
out=${1:-runs/starter}
recipes=launch/recipes

dcar fit-tokenizer output="$out/tokenizer" vocab_size=512 max_frames=200000 projection_size=64
dcar prepare out_dir="$out/prepared" tokenizer="$out/tokenizer"

# Vocoder: voices with little speech are also heard slower and faster, as other voices. Without the adversarial losses,
# which need a GPU.
dcar prepare out_dir="$out/copies" tokenizer="$out/tokenizer" splits=[train,dev] copies_below=200 \
  speeds=[1.0,0.85,0.92,1.08,1.17]
python -m dcar.vocoder_data --prepared "$out/copies" --out "$out/vocoder.safetensors"
vocoder=(--data "$out/vocoder.safetensors" --renderer_batch_size 6 --segment_tokens 40 --warm_steps 1000000)
dcar train-vocoder "${vocoder[@]}" --out "$out/vocoder_first" --max_minutes 32 --renderer_every 4 \
  --vocoder '{"vocab_size":512}'
dcar train-vocoder "${vocoder[@]}" --out "$out/vocoder" --init_from "$out/vocoder_first/export" --max_minutes 9.5 \
  --renderer_every 8 --voice_balance 0 --learning_rate 5e-4 \
  --vocoder '{"vocab_size":512,"acoustic_dropout":0.1,"token_dropout":0.03}'

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
