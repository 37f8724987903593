#!/usr/bin/env bash
# Make the shipped models, on two CPU cores in about ten hours (docs/history.md has the result of each step). Users run the
# same commands on corpora of their own. Usage:
#   ./launch/starter/make_models.sh runs/starter CORPUS [BLENDS [MORE_BLENDS]]
# CORPUS: the starter corpus with all of its training speech, made by launch/starter/make_corpus.py plan, speak and pack;
# the shipped corpus contains a third of it.
# BLENDS, MORE_BLENDS: corpora of blended voices for the vocoder, which are not shipped (made by launch/starter/make_corpus.py
# blend, as in its two examples, speak and pack).
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
export OMP_NUM_THREADS=1
out=$1
corpus=$2
blends=${3:-}
more=${4:-}

dcar fit-tokenizer path="$corpus" out="$out/tokenizer" vocab_size=1024 max_frames=200000 projection_size=64
dcar prepare path="$corpus" out="$out/prepared" tokenizer="$out/tokenizer"

# Vocoder: voices with little speech are added at lower and higher speeds, as further voices. The renderer depends on spectra
# and not on tokens, so the shipped one is used. To train one as well, omit renderer_from and set renderer_every=4
# renderer_batch_size=6 segment_tokens=40; this takes 32 minutes.
dcar prepare path="$corpus" out="$out/copies" tokenizer="$out/tokenizer" splits=[train,dev] copies_below=200 \
  speeds=[1.0,0.85,0.92,1.08,1.17]
python -m dcar.vocoder.training.pack prepared="$out/copies" out="$out/vocoder.safetensors" states=true
vocoder=(data="$out/vocoder.safetensors" renderer_every=0)
dcar train-vocoder "${vocoder[@]}" out="$out/vocoder_first" max_minutes=18 renderer_from=dcar/assets/vocoder
vocoder+=(vocoder='{acoustic_dropout: 0.1, token_dropout: 0.03}')
dcar train-vocoder "${vocoder[@]}" out="$out/vocoder_second" init_from="$out/vocoder_first/export" max_minutes=6 \
  voice_balance=0 learning_rate=5e-4
# Next, a loss on the words (whisper-base) is added; then a thousand voices; then a loss on the voice (Resemblyzer); then 651
# voices, mixed from those of other languages too, and the same at a lower speed.
vocoder+=(voice_balance=0.3 words_weight=1)
dcar train-vocoder "${vocoder[@]}" out="$out/vocoder_words" init_from="$out/vocoder_second/export" max_minutes=12 \
  learning_rate=5e-4
packs="$out/vocoder.safetensors"
add_voices() {  # corpus, name, speed
  dcar prepare corpus=starter path="$1" out="$out/$2" tokenizer="$out/tokenizer" splits=[train] speeds="[$3]"
  python -m dcar.vocoder.training.pack prepared="$out/$2" out="$out/vocoder_$2.safetensors" states=true
  packs+=",$out/vocoder_$2.safetensors"
}
if [ -n "$blends" ]; then add_voices "$blends" blends 1.0; fi
dcar train-vocoder "${vocoder[@]}" data="$packs" out="$out/vocoder_blends" init_from="$out/vocoder_words/export" \
  max_minutes=28 learning_rate=7e-4
vocoder+=(voice_weight=1)
dcar train-vocoder "${vocoder[@]}" data="$packs" out="$out/vocoder_voices" init_from="$out/vocoder_blends/export" \
  max_minutes=18 learning_rate=5e-4
if [ -n "$more" ]; then add_voices "$more" more 1.0; add_voices "$more" more_slow 0.88; fi
dcar train-vocoder "${vocoder[@]}" data="$packs" out="$out/vocoder" init_from="$out/vocoder_voices/export" \
  max_minutes=36 learning_rate=7e-4
dcar analyse what=vocoder data="$out/prepared" vocoder="$out/vocoder/export" out="$out/vocoder_quality"

# Stage one: the recipes of the quickstart with more steps.
dcar train --config car_starter data="$out/prepared" out="$out/trunk" max_steps=1000
dcar train --config car_starter:shared data="$out/prepared" init_from="$out/trunk" out="$out/car_first"
dcar train --config car_starter:far data="$out/prepared" out="$out/far_first" max_steps=1000
# Continue with 3,600 more sentences, CAR and FAR for equally many steps. Their tokens are shipped, their audio is not.
python launch/starter/make_corpus.py add sentences=launch/starter/sentences_more.txt out="$out/added"
python launch/starter/make_corpus.py speak work="$out/added"
python launch/starter/make_corpus.py pack work="$out/added" out="$out/added/corpus"
dcar prepare corpus=starter path="$out/added/corpus" out="$out/prepared_added" tokenizer="$out/tokenizer" splits=[train]
dcar prepare mode=join data=["$out/prepared","$out/prepared_added"] share=0 out="$out/prepared_all"
dcar train --config car_starter:more data="$out/prepared_all" init_from="$out/car_first" out="$out/car"
dcar train --config car_starter:far_more data="$out/prepared_all" init_from="$out/far_first" out="$out/far"

# The reward recogniser is trained on the corpus resynthesised from its tokens by the vocoder: every sentence in its own voice
# and in another one.
dcar prepare mode=resynthesize data="$out/prepared" split=dev vocoder="$out/vocoder/export" out="$out/resynthesis"
for voices in "" other/; do
  dcar prepare mode=resynthesize data="$out/prepared_all" split=train vocoder="$out/vocoder/export" out="$out/resynthesis/$voices" \
    batch_size=16 ${voices:+other_voices=true seed=1} >&2
  sed "s|\"audio\": \"|&$voices|" "$out/resynthesis/${voices}train.jsonl"
done >"$out/resynthesis/voices.jsonl"
python -m launch.starter.train_recognizer train_manifest="$out/resynthesis/voices.jsonl" \
  dev_manifest="$out/resynthesis/dev.jsonl" out="$out/recognizer"
# The token recogniser is trained on the same tokens, without audio.
dcar train-recognizer --config token_recognizer_starter data="$out/prepared_all" \
  out="$out/token_recognizer"

# Distillation: the decoders continue with training sentences decoded by CAR, the best of four by the token recogniser. In a
# second round, the sentences are decoded by the result of the first. FAR is trained on the same sentences. In a third round,
# half of them are joined, two or three at a time, so that both can decode long texts.
distil() {  # name, teacher decoder, settings
  dcar distil --config distil_starter data="$out/prepared_all" decoder="$2" \
    token_recognizer="$out/token_recognizer" out="$out/$1" "${@:3}"
}
again=methods=[car-5@t0,car-10@t0,car-5@t0.4-k10]  # for further rounds, whose teacher can decode longer chunks
half() {  # Store weights in float16, in half the file; later steps identify the decoder by these weights.
  python -c "import sys; from dcar.model.load import load_decoder as load; load(sys.argv[1]).save_pretrained(sys.argv[2], half=True)" \
    "$1" "$2"
}
distil distilled_first "$out/car"
dcar train --config car_starter:distilled data="$out/distilled_first" init_from="$out/car" out="$out/car_distilled_first"
distil distilled "$out/car_distilled_first" "$again"
dcar train --config car_starter:distilled data="$out/distilled" init_from="$out/car_distilled_first" \
  out="$out/car_distilled"
dcar train --config car_starter:far_distilled data="$out/distilled" init_from="$out/far" out="$out/far_distilled"
distil distilled_third "$out/car_distilled" "$again"
dcar prepare mode=join data=["$out/distilled_third"] out="$out/joined"
dcar train --config car_starter:distilled data="$out/joined" init_from="$out/car_distilled" \
  per_device_train_batch_size=8 out="$out/car_joined"
dcar train --config car_starter:far_distilled data="$out/joined" init_from="$out/far_distilled" per_device_train_batch_size=8 \
  out="$out/far_joined"
half "$out/car_joined" "$out/decoder"
half "$out/far_joined" "$out/far_decoder"

# The policies, one per temperature, with rewards by the token recogniser; the first is trained on joined sentences too. The
# time of a pass is that of an idle core; a run beside other processes should not measure it.
# The chunk scorer learns from what the decoder itself speaks: trained on recordings, it makes chunks worse.
distil distilled_fourth "$out/decoder" "$again" limit=2300
dcar prepare mode=join data=["$out/distilled_fourth"] max_seconds=12 seed=1 out="$out/policy_texts"
scorer() {  # name, data, steps, settings
  dcar train-chunk-scorer --config chunk_scorer_starter decoder="$out/decoder" data="$2" max_steps="$3" out="$out/$1" "${@:4}"
}
scorer chunk_scorer_first "$out/prepared_all" 300
scorer chunk_scorer_second "$out/distilled_fourth" 400 init_from="$out/chunk_scorer_first"
scorer chunk_scorer "$out/policy_texts" 100 init_from="$out/chunk_scorer_second" half_weights=true
dcpo() {  # name, settings
  dcar train-policy --config dcpo_starter decoder="$out/decoder" data="$out/policy_texts" vocoder="$out/vocoder/export" \
    token_recognizer="$out/token_recognizer" chunk_scorer="$out/chunk_scorer" seed=1 pass_cost=[0.97,0.22] \
    out="$out/dcpo_$1" "${@:2}"
  dcar export run="$out/dcpo_$1" decoder="$out/decoder" out="$out/$1"
}
dcpo policy_t1.0
dcpo policy_t0.4 temperature=0.4 top_k=10 max_steps=10 data="$out/prepared_all"

# The voices of `dcar speak`.
python -m launch.starter.make_voices data="$out/prepared" out="$out/voices.safetensors"
