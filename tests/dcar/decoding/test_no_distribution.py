"""A model that gives no distribution is reported, with utterance and position, instead of ending utterances at once."""

import pytest
import torch
from dcar.decoding.engine.run import engine_for
from dcar.decoding.fast.passes import fast
from tiny_decoders import tiny_decoder
from tiny_verifiers import imperfect_draft, method_of
from ways import policy_of

from dcar.decoding import ChunkMethod, FixedChunk, PolicyChunk, decode
from dcar.errors import DistributionError
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.vadusa import Vadusa, chain

SAMPLING = SamplingConfig(temperature=0.9, max_tokens=40, max_tokens_per_text_unit=6, min_tokens=12)
GREEDY = SamplingConfig(temperature=0, max_tokens=40, max_tokens_per_text_unit=6, min_tokens=12)


def speak(way: str, model, prompts, method, sampling, batch: int = 3):
    if way == "engine":
        policy = getattr(method.schedule, "policy", None)
        return engine_for(model, prompts, sampling, batch=batch, policy=policy).decode(prompts, method, sampling)
    return decode(fast(model) if way == "fast" else model, prompts, method, sampling, batch_size=batch)


def broken(token: int, value: float = float("nan")):
    """A decoder that is sound until it reads `token`."""
    model = tiny_decoder()
    with torch.no_grad():
        model.speech_embedding.weight[token] = value
    return model


@pytest.mark.parametrize("way", ["loop", "fast", "engine"])
@pytest.mark.parametrize("sampling", [SAMPLING, GREEDY])
def test_an_utterance_without_a_distribution_is_named_with_its_position(prompts, way, sampling):
    method = ChunkMethod(FixedChunk(2))
    sound = decode(tiny_decoder(), prompts[3:4], method, sampling)[0].tokens
    token = next(t for t in sound if t not in prompts[3].prompt_ids)
    read = sound.index(token) // 2 * 2 + 2  # it is read with its chunk; the next distribution is the first that suffers
    with pytest.raises(DistributionError, match=f"utt3: there is no distribution for token {read}"):
        speak(way, broken(token), prompts[3:4], method, sampling)


@pytest.mark.parametrize("way", ["loop", "fast", "engine"])
def test_the_others_of_a_batch_are_not_blamed_and_the_finished_are_kept(prompts, way):
    """Utterance 5 has a prompt that breaks; the one before it is complete."""
    token = next(t for t in prompts[5].prompt_ids if t not in prompts[2].prompt_ids)
    method = ChunkMethod(FixedChunk(1))
    sampling = SamplingConfig(temperature=0, max_tokens=2, max_tokens_per_text_unit=6)
    assert token not in decode(tiny_decoder(), prompts[2:3], method, sampling)[0].tokens
    with pytest.raises(DistributionError, match="utt5: there is no distribution for token 0") as raised:
        speak(way, broken(token), [prompts[2], prompts[5]], method, sampling, batch=1)
    assert [r.utterance_id for r in raised.value.finished] == ["utt2"]


@pytest.mark.parametrize("way", ["loop", "fast", "engine"])
def test_a_policy_without_a_distribution(decoder, prompts, way):
    policy = policy_of()
    with torch.no_grad():
        policy.output.bias[1] = float("nan")
    with pytest.raises(DistributionError, match="chunk"):
        speak(way, decoder, prompts, ChunkMethod(PolicyChunk(policy, "sample")), SAMPLING)


@pytest.mark.parametrize("kind", ["sd", "ssd", "typical", "vadusa"])
def test_verifiers_report_it_too(prompts, kind):
    model = broken(next(t for t in prompts[5].prompt_ids if t not in prompts[2].prompt_ids))
    verifier = Vadusa(2, chain(3)) if kind == "vadusa" else method_of(kind, model, HeadDrafter(2))
    with pytest.raises(DistributionError, match="utt5: there is no distribution for token 0"):
        decode(model, [prompts[2], prompts[5]], verifier, SamplingConfig(max_tokens=2), batch_size=2)


def test_a_draft_model_without_a_distribution(decoder, prompts):
    draft = imperfect_draft(decoder)
    with torch.no_grad():
        draft.heads.base.weight[3] = float("nan")
    with pytest.raises(DistributionError, match="utt"):
        decode(decoder, prompts, method_of("sd", decoder, ModelDrafter(draft, 2)), SAMPLING)
