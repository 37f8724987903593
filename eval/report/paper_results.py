"""What the papers report, transcribed, one entry a number: the only place of the project that holds these figures.

A setup is one table of one paper: its model, data, recogniser and machine, and the baseline that its numbers are
read against. WER in percent as printed. Where a paper prints a time and no speed-up, `derived` is set and the speed-up
is the ratio of the baseline's printed time to the method's.
"""

from __future__ import annotations

from dataclasses import dataclass

SSD = "SSD (Lin et al., Accelerating Autoregressive Speech Synthesis Inference With Speech Speculative Decoding, 2025)"
PCG = "PCG (Yanuka et al., Principled Coarse-Grained Acceptance for Speculative Decoding in Speech, arXiv 2511.13732)"
MTP = ("MTP-Viterbi (Nguyen et al., Accelerating Codec-based Speech Synthesis with Multi-Token Prediction and "
       "Speculative Decoding, arXiv 2410.13839)")
DCAR = ("DCAR (Li et al., Robust and Efficient Autoregressive Speech Synthesis with Dynamic Chunk-wise Prediction "
        "Policy, arXiv 2506.22023)")


@dataclass(frozen=True)
class Result:
    """A row of a paper's table. method: the row of a comparison that does the same, or only its family where the paper
    does not give the setting; name: as the paper calls it."""

    method: str
    name: str
    wer: float  # %
    speedup: float | None = None  # against the setup's baseline
    cer: float | None = None  # %
    tokens_per_pass: float | None = None
    derived: bool = False  # the speed-up is a ratio of printed times, computed here


@dataclass(frozen=True)
class Setup:
    """A table and what stands behind it. speed_baseline and wer_baseline name the rows of a comparison that play the
    part of the paper's own baselines; baseline_wer is what the paper printed for the latter."""

    paper: str
    table: str
    model: str
    data: str
    recognizer: str
    machine: str
    speed_baseline: str
    wer_baseline: str
    baseline_name: str
    baseline_wer: float
    remarks: tuple[str, ...]
    results: tuple[Result, ...]


SETUPS: tuple[Setup, ...] = (
    Setup(
        paper=SSD, table="Tables 1 and 3",
        model="CosyVoice 2 language model (24 layers, Qwen2.5-0.5B shape); draft of 8 of its layers, 3 drafted tokens",
        data="draft trained on LibriTTS (about 580 h); test: 500 utterances, 37 speakers of LibriTTS test-clean "
             "(UniCATS test set B)",
        recognizer="Whisper-large-v3", machine="A100 40 GB",
        speed_baseline="car-1", wer_baseline="car-1", baseline_name="CosyVoice 2, one token a pass", baseline_wer=3.67,
        remarks=(
            "The draft costs 0.44 of its target (LM-RTF 0.222 / 0.504), so a round with three drafted tokens costs "
            "about 2.3 target passes: 1.40× means about 3.25 tokens a round, and 1.72× is the most that such a draft "
            "could give.",
            "Its β = 0, which should have the target's law, has 6.34 % where the target has 3.67 %, and WER does not "
            "grow with β: the relaxation is not what costs the errors there. Here β = 0 is compared with plain "
            "decoding in the table above, and their equality in law is tested by enumeration.",
        ),
        results=(
            Result("ssd-0-eos@draft", "β = 0.0", 6.34, 0.504 / 0.509, derived=True),
            Result("ssd-0.1-eos@draft", "β = 0.1", 5.71, 0.504 / 0.444, derived=True),
            Result("ssd-0.2-eos@draft", "β = 0.2", 6.08, 0.504 / 0.408, derived=True),
            Result("ssd-0.3-eos@draft", "β = 0.3", 6.29, 0.504 / 0.386, derived=True),
            Result("ssd-0.4-eos@draft", "β = 0.4", 5.70, 0.504 / 0.360, derived=True),
        ),
    ),
    Setup(
        paper=PCG, table="Table 1",
        model="Llasa-8B with X-codec2 (65,536 codes); draft of 3 of its layers, 3 drafted tokens, temperature 0.8",
        data="draft trained on Libri-heavy (50,000 h); test: 500 utterances of LibriTTS test-clean, 3 seeds",
        recognizer="HuBERT-large", machine="H100 80 GB",
        speed_baseline="car-1", wer_baseline="sd", baseline_name="the target with lossless SD", baseline_wer=11.1,
        remarks=(
            "The draft alone is 5.2× as fast as its target: a round with three drafted tokens costs about 1.6 target "
            "passes. At 0.98× for SD that is 1.55 tokens a round, at 1.4× for SSD and PCG about 2.2.",
            "65,536 codes have many near neighbours (the largest groups average about 140 tokens); a codebook of some "
            "hundred codes may have few, so that θ reaches either nothing or sounds that differ.",
        ),
        results=(
            Result("sd", "target + SD", 11.1, 0.98, cer=5.5),
            Result("ssd-0.3-eos@draft", "target + SSD, bias 0.3", 18.5, 1.4, cer=11.6),
            Result("pcg", "target + PCG", 13.8, 1.4, cer=7.8),
        ),
    ),
    Setup(
        paper=MTP, table="Tables I and II",
        model="USLM on SpeechTokenizer, trained from scratch; several heads on one hidden state",
        data="LibriTTS, all training subsets; test: test-clean",
        recognizer="NeMo Conformer-Transducer large", machine="A6000",
        speed_baseline="far", wer_baseline="far", baseline_name="USLM, one token a pass", baseline_wer=11.5,
        remarks=(
            "Speed there is time per token of the autoregressive module: 23.5 ms for USLM, 4.4 ms with 8 heads, 8.0 ms "
            "with 4. Table I's row uses 8 heads; its top-k is not given.",
            "Fewer errors than with one token a pass, from the same kind of heads as CAR-k: there is no verification, "
            "so these rows say what choosing among the heads' candidates adds to CAR-k of the same size.",
        ),
        results=(
            Result("mtp-viterbi-8", "USLM + MTP, 8 heads (Table I)", 8.7, 5.34, cer=5.2, tokens_per_pass=8),
            Result("mtp-viterbi-8", "n = 8, k = 3 (Table II)", 8.6, 23.5 / 4.4, tokens_per_pass=8, derived=True),
            Result("mtp-viterbi-4", "n = 4, k = 3 (Table II)", 8.1, 23.5 / 8.0, tokens_per_pass=4, derived=True),
        ),
    ),
    Setup(
        paper=MTP, table="Table I",
        model="VALL-E on SpeechTokenizer, trained from scratch",
        data="LibriTTS, all training subsets; test: test-clean",
        recognizer="NeMo Conformer-Transducer large", machine="A6000",
        speed_baseline="far", wer_baseline="far", baseline_name="VALL-E, one token a pass", baseline_wer=12.8,
        remarks=(),
        results=(Result("mtp-viterbi-8", "VALL-E + MTP, 8 heads", 12.0, 4.56, cer=8.3, tokens_per_pass=8),),
    ),
    Setup(
        paper=DCAR, table="Tables 1 and 3",
        model="12-layer decoder of width 1024 with 6 additional heads, HuBERT k-means tokens (2048 codes, 50 Hz)",
        data="LibriTTS training set (585 h); test: UniCATS test set B, 500 utterances",
        recognizer="Whisper-large-v3", machine="RTX 4090",
        speed_baseline="far", wer_baseline="far", baseline_name="FAR", baseline_wer=9.99,
        remarks=(
            "The printed speed-ups exceed the ratios of the printed RTFs by 1 to 8 %, as if a constant part (the "
            "vocoder's) were left out of them; the speed-up here is of the language model alone.",
            "VADUSA's rows are the DCAR authors' own runs of it on the same architecture; the VADUSA paper's tables "
            "were not available.",
        ),
        results=(
            Result("car-2", "CAR, 2 tokens", 3.04, 1.89, tokens_per_pass=2),
            Result("car-3", "CAR, 3 tokens", 2.99, 2.83, tokens_per_pass=3),
            Result("car-4", "CAR, 4 tokens", 3.09, 3.60, tokens_per_pass=4),
            Result("dcar", "DCAR – [2,3]", 2.82, 2.39, tokens_per_pass=2.78),
            Result("dcar", "DCAR – [2,3,4]", 2.77, 2.61, tokens_per_pass=3.08),
            Result("vadusa-2", "VADUSA, tolerance 2", 3.86, 3.03),
            Result("vadusa-3", "VADUSA, tolerance 3", 4.17, 3.12),
        ),
    ),
    Setup(
        paper=DCAR, table="Table 1",
        model="the same decoder with S3 tokens (4096 codes, 50 Hz)",
        data="LibriTTS training set (585 h); test: UniCATS test set B, 500 utterances",
        recognizer="Whisper-large-v3", machine="RTX 4090",
        speed_baseline="far", wer_baseline="far", baseline_name="FAR", baseline_wer=2.31,
        remarks=("With supervised tokens FAR is nearly as good as the rest: how much chunks help depends on how "
                 "unstable next-token decoding is.",),
        results=(
            Result("car-2", "CAR, 2 tokens", 2.02, 2.04, tokens_per_pass=2),
            Result("car-3", "CAR, 3 tokens", 2.09, 2.94, tokens_per_pass=3),
            Result("car-4", "CAR, 4 tokens", 2.06, 3.76, tokens_per_pass=4),
            Result("dcar", "DCAR – [2,3]", 1.84, 2.18, tokens_per_pass=2.41),
            Result("dcar", "DCAR – [2,3,4]", 1.92, 2.89, tokens_per_pass=3.27),
        ),
    ),
    Setup(
        paper=DCAR, table="Table 5",
        model="CosyVoice with 6 additional heads, S3 tokens (50 Hz)",
        data="heads trained on LibriTTS; test: UniCATS test set B, 500 utterances",
        recognizer="Whisper-large-v3", machine="not given for this table",
        speed_baseline="far", wer_baseline="far", baseline_name="FAR", baseline_wer=4.74,
        remarks=("The speed-ups are ratios of the printed RTFs; as far as these include the vocoder, those of the "
                 "language model are larger.",),
        results=(
            Result("car-2", "CAR, 2 tokens", 3.16, 0.250 / 0.184, tokens_per_pass=2, derived=True),
            Result("car-3", "CAR, 3 tokens", 3.73, 0.250 / 0.162, tokens_per_pass=3, derived=True),
            Result("car-4", "CAR, 4 tokens", 3.79, 0.250 / 0.149, tokens_per_pass=4, derived=True),
            Result("dcar", "DCAR – [2,3]", 2.84, 0.250 / 0.215, tokens_per_pass=2.12, derived=True),
            Result("dcar", "DCAR – [2,3,4]", 2.93, 0.250 / 0.218, tokens_per_pass=2.01, derived=True),
        ),
    ),
)
