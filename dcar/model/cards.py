"""Model cards (README.md) made from a model and from what its run recorded (provenance.json)."""

from collections.abc import Mapping, Sequence
from typing import Any

from heads.checkpoint import Checkpoint


def model_card(
    title: str,
    summary: str,
    facts: Sequence[tuple[str, Any]],
    source: Mapping[str, Any],
    *,
    metrics_of: str,
    code: str,
    tags: Sequence[str] = (),
    note: str = "",
    settings: Sequence[str] = (),
    license: str = "apache-2.0",
) -> str:
    """Return the text of README.md with front matter for the Hub.

    facts: (name, value) in the order in which they are listed. source: record of `provenance`, with
    `metrics` and `config`; settings: names in `config` that are worth showing. Facts that were not
    recorded are listed as such, not left out.
    """
    metrics = source.get("metrics") or {}
    rows = (
        "\n".join(f"| {k} | {short(v)} |" for k, v in sorted(metrics.items()))
        or "| none recorded | |"
    )
    run = source.get("config") or {}
    chosen = ", ".join(f"{name} {run[name]}" for name in settings if name in run)
    listed = "\n".join(f"- {name}: {value}" for name, value in facts)
    steps, processes = source.get("steps", "?"), source.get("processes", "?")
    return f"""---
library_name: dcar
tags: [{", ".join(["text-to-speech", "chunk-wise-autoregressive", *tags])}]
license: {license}
---
# {title}

{summary}

{listed}
- run: {steps} steps on {processes} process(es), {source.get("revision", "?")}
- settings: {chosen or "not recorded"}

| metric ({metrics_of}) | value |
| --- | --- |
{rows}

{note + chr(10) * 2 if note else ""}```python
{code}
```
"""


def short(value: Any) -> str:
    """Format a number, or a list of numbers, with four decimals."""
    if isinstance(value, list):
        return "[" + ", ".join(short(v) for v in value) + "]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def decoder_card(decoder: Checkpoint, source: Mapping[str, Any]) -> str:
    """Return README.md of a decoder: shape, identity, data, and the dev metrics of its run."""
    config = decoder.config
    data = source.get("data") or {}
    corpus = data.get("corpus") or {}
    counts = ", ".join(
        f"{split} {c.get('utterances')}" for split, c in (data.get("counts") or {}).items()
    )
    heads = config.num_prediction_heads
    facts: list[tuple[str, Any]] = [
        (
            "heads",
            f"{heads}, {config.heads}; a step keeps 1..{heads} tokens"
            if heads > 1
            else "1 (FAR, next-token prediction)",
        ),
        (
            "size",
            f"{sum(p.numel() for p in decoder.parameters()):,} parameters, {config.num_layers} "
            f"layers, width {config.hidden_size}",
        ),
        (
            "speech",
            f"{config.speech_vocab_size} codes of {config.tokenizer or 'a tokenizer not recorded'}",
        ),
        ("text", config.phonemes or "not recorded"),
        (
            "layout",
            "speaker prompt, closed by a start symbol"
            if config.bos
            else "continuation of the prompt",
        ),
        ("checksum", f"`{decoder.checksum()}`"),
        ("corpus", f"{corpus.get('kind', 'not recorded')} ({counts or 'sizes not recorded'})"),
    ]
    tags: list[str] = []
    if origin := getattr(config, "source", ""):
        kind = config.architecture.get("model_type")
        facts.insert(
            0,
            (
                "made of",
                f"{source.get('source') or source.get('backbone') or 'not recorded'} "
                f"({origin}, {kind}); its licence applies to these weights",
            ),
        )
        tags.append(str(kind))
    title = "CAR decoder" if heads > 1 else "FAR decoder"
    if target := getattr(config, "target_checksum", ""):
        title = "Draft model"
        facts.insert(0, ("drafts for", f"the decoder `{target}`, for speculative decoding"))
    return model_card(
        title,
        f"Predicts the next {heads} speech token(s) from text, a speech prompt and the tokens so "
        "far; a vocoder for the same speech tokens makes them audible.",
        facts,
        source,
        metrics_of="teacher-forced, dev split",
        tags=tags,
        license="other" if origin else "apache-2.0",
        settings=(
            "optim learning_rate per_device_train_batch_size gradient_accumulation_steps "
            "max_steps bf16 seed"
        ).split(),
        code="from dcar.model.load import load_decoder\n\ndecoder = "
        'load_decoder("path/to/this/directory")',
    )
