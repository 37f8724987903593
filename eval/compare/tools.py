"""Models, data and scorers of a comparison."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate import PartialState

from dcar.methods import Models, load_models
from dcar.model.companions import language_for, text_units
from dcar.prepare.prepared import prepared_info
from dcar.prompts.choose import by_digest, in_turns
from dcar.prompts.chooser import PromptChooser, with_prompts
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.load import corpus_recordings, split_for, vocoder_for
from dcar.prompts.texts import SPLIT, read_texts, text_list, text_prompts
from dcar.recognition.base import Recognizer, unknown_characters
from dcar.recognition.load import load_recognizer
from dcar.storage import digest
from dcar.text.base import SymbolUnits, TextUnits
from dcar.text.units import Characters, units_for
from dcar.tokens.alignment import ENOUGH, PhonemeAligner
from dcar.tokens.codebook import codebook_of
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import vocoder_identity
from eval.compare.config import CompareConfig
from eval.compare.plan import choose_items
from eval.results.training import training_note
from eval.scorers.load import Scorer, load_scorers

logger = logging.getLogger(__name__)


@dataclass
class Tools:
    """Models, data and scorers of a comparison; loaded from a config, or assembled in a notebook
    or test."""

    # name of a set of texts -> prompt seed -> its utterances
    sets: Mapping[str, Mapping[int, list[PromptItem]]]
    models: Models
    vocoder: Vocoder
    recognizer: Recognizer
    # utterance id -> waveform, rate in Hz
    recording: Callable[[str], tuple[np.ndarray, int]] | None = None
    identity: dict[str, str] = field(default_factory=dict)  # names and checksums of vocoder, ASR, …
    # description of the data, for the report; `texts`: the lists among its sets of texts
    corpus: dict[str, Any] = field(default_factory=lambda: {"texts": []})
    # by name; every record carries a score of each
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    # [V, P] centroids of the tokenizer, by which renderings are compared
    codebook: np.ndarray | None = None
    aligner: PhonemeAligner | None = None  # lays texts along the tokens, for pictures of samples
    training: str = ""  # sentence on the training of FAR and CAR (eval/results/training.py)

    @property
    def items(self) -> list[PromptItem]:
        """Utterances of the first set of texts with the prompts of the first seed."""
        return next(iter(next(iter(self.sets.values())).values()))

    @property
    def languages(self) -> set[str]:
        """Languages of all utterances."""
        sets = (items for by_seed in self.sets.values() for items in by_seed.values())
        return {item.language for items in sets for item in items}


def shown_units(units: TextUnits, texts: Sequence[str], languages: Sequence[str]) -> SymbolUnits:
    """Return the units that pictures show of a text: the decoder's, or for a language model the
    default phonemes, or characters if these do not fit."""
    if isinstance(units, SymbolUnits):
        return units
    default = units_for()
    return default if languages == default.languages else Characters.collected(texts, languages)


def load_tools(config: CompareConfig, device: str) -> Tools:
    """Load models, vocoder, recogniser, scorers and the utterances of a comparison; of the
    split, no other rows are read. Raises ConfigError, CheckpointError or DataError if parts do
    not belong together."""
    info = prepared_info(config.data)
    models = load_models(
        config.decoder,
        config.far_decoder or "",
        config.policies,
        device,
        config.draft or "",
        config.statistics or "",
        dtype=config.dtype,
        decoders=config.decoders,
    )
    whole = split = split_for(models.decoder, config.data, config.split)
    if SPLIT in config.limits:
        split = with_prompts(whole, f"{config.data}: split {config.split}")
    bos = models.decoder.config.bos

    def utterances(name: str, limit: int) -> dict[int, list[PromptItem]]:
        """Return the utterances of a set of texts by prompt seed."""
        texts = []
        if name != SPLIT:
            units = text_units(config.decoder)
            own = config.language or (info.languages[0] if len(info.languages) == 1 else "")
            texts = read_texts(name, units, language_for(units, models.decoder.config, own))
        rows, source = in_turns(whole, len(texts)), whole
        if name == SPLIT:
            fewest = min(filter(None, (limit, config.limit)), default=0)
            columns, source = split.columns, split
            rows = by_digest(columns["digest_rank"], columns["id_rank"], fewest)
        chooser = PromptChooser(source, config.prompt_tokens)
        by_seed = {
            seed: make_prompts(source, config.prompt_tokens, seed, bos, rows, chooser)
            for seed in config.prompt_seeds
        }
        if name == SPLIT:
            return by_seed
        # a text has the same prompt whatever the limit
        return {s: choose_items(text_prompts(texts, items), limit) for s, items in by_seed.items()}

    sets = {name: utterances(name, limit) for name, limit in config.limits.items()}
    every_item = [i for by_seed in sets.values() for made in by_seed.values() for i in made]
    recordings = corpus_recordings(config.data)
    # raise now, not at the end, if the corpus is missing
    if config.audio_utterances and every_item:
        recordings(every_item[0].prompt_utterance_id)
    recorded = split.rows[:ENOUGH]
    prompts = PromptAudio.of_items(every_item, recordings)
    vocoder = vocoder_for(models.decoder, config.data, every_item, config.vocoder, device, prompts)
    recognizer = load_recognizer(config.recognizer, device=device)
    # another language is refused now, not after the first method
    texts = sorted({(item.language, item.text) for item in every_item})
    if (unread := unknown_characters(recognizer, texts)) and PartialState().is_main_process:
        logger.warning("%s: they count as errors of every method", unread)
    several = len(config.prompt_seeds) * len(config.seeds) > 1
    codes = models.decoder.config.speech_vocab_size
    return Tools(
        sets=sets,
        models=models,
        vocoder=vocoder,
        recognizer=recognizer,
        recording=recordings,
        identity={"vocoder": vocoder_identity(vocoder, config.vocoder)},
        corpus={
            "corpus": info.corpus,
            "tokenizer": info.tokenizer.identity,
            "split": config.split,
            **({"own_prompt": left_out} if (left_out := len(whole) - len(split)) else {}),
            "texts": [{"name": name, **digest(text_list(name))} for name in sets if name != SPLIT],
        },
        scorers=load_scorers(config.scorers, prompts, device),
        # without a second rendering there is no variety
        codebook=codebook_of(info.tokenizer, config.data) if several else None,
        aligner=PhonemeAligner.fit(
            recorded["speech"],
            recorded["text"],
            codes,
            shown_units(text_units(config.decoder), recorded["text"], info.languages),
        )
        if config.audio_utterances
        else None,
        training=training_note(config.decoder, config.far_decoder) if config.far_decoder else "",
    )
