"""FastDecoder speaks as the decoder that it reads: every method of the loop (with graphs: test_gpu.py)."""

import json
from functools import partial

import pytest
import torch
from compare_worker import tiny_config, tiny_tools
from dcar.decoding.fast.passes import FastDecoder, fast
from tiny_decoders import tiny_decoder
from tiny_verifiers import imperfect_draft, method_of
from ways import policy_of, same

from dcar.decoding import ChunkMethod, FixedChunk, PolicyChunk, Prompt, decode
from dcar.errors import ConfigError, EngineError
from dcar.sampling import SamplingConfig
from eval.compare.run import run as compare
from eval.verifiers import mtp_viterbi, vadusa
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.statistics import VerifierStatistics

SAMPLING = SamplingConfig(temperature=0.9, top_k=8, max_tokens=60, max_tokens_per_text_unit=6)
NAMES = ["far", "car-3", "dcar", "sd", "ssd", "typical", "sd@draft", "vadusa", "mtp-viterbi"]


def method(name: str, target, draft=None):
    """A fresh method; `draft` drafts for sd@draft."""
    if name in ("far", "car-3"):
        return ChunkMethod(FixedChunk(1 if name == "far" else 3))
    if name == "dcar":
        return ChunkMethod(PolicyChunk(policy_of(), "sample"))
    if name in ("vadusa", "mtp-viterbi"):
        states = target.config.output_size + 1
        pairs = torch.tensor([i for i in range(states**2) if i % states < states - 1])  # nothing is followed by "start"
        statistics = VerifierStatistics(
            target.checksum(), "", states, torch.full((target.config.num_prediction_heads - 1, 4), 0.2),
            pairs, pairs % 7 + 1, torch.ones(1), torch.ones(1))
        build = (partial(vadusa.from_settings, tau=2, nodes=None, chained=False) if name == "vadusa" else
                 partial(mtp_viterbi.from_settings, heads=3, candidates=3))
        return build(name, target, statistics)[0]()
    kind, _, source = name.partition("@")
    return method_of(kind, target, ModelDrafter(draft, 3) if source else HeadDrafter(3))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_speaks_as_the_decoder(decoder, prompts, name, rows):
    draft = imperfect_draft(decoder)
    chosen = prompts[-rows:]
    expected = decode(decoder, chosen, method(name, decoder, draft), SAMPLING, seed=3, record_hidden=True)
    got = decode(FastDecoder(decoder), chosen, method(name, decoder, FastDecoder(draft)), SAMPLING, seed=3,
                 record_hidden=True)
    same(got, expected)
    assert [(r.draft_passes, r.rounds_accepted) for r in got] == [(r.draft_passes, r.rounds_accepted) for r in expected]


def test_another_layout():
    model = tiny_decoder(bos=False)
    prompts = [Prompt(f"u{i}", tuple(range(1, 4 + i)), tuple(range(1, 3 + i))) for i in range(3)]
    for chosen in (prompts, prompts[:1]):
        same(decode(FastDecoder(model), chosen, method("sd", model), SAMPLING, record_hidden=True),
             decode(model, chosen, method("sd", model), SAMPLING, record_hidden=True))


def test_what_it_refuses(decoder, prompts, device):
    checksum = decoder.checksum()
    quick = FastDecoder(decoder.to(device), graphs=True)
    assert quick.checksum() == checksum
    one, three, four = (torch.tensor(ids).to(device) for ids in ([[1]], [3], [[1, 2, 3]]))
    first, _ = quick.prefill(four, three, four, three, 200)
    quick.prefill(four, three, four, three, 100)  # in the same store
    with pytest.raises(EngineError, match="prefilled last"):
        quick.extend(first, one, one[0])
    with pytest.raises(EngineError, match="rotary table"):
        quick.prefill(four, three, four, three, 9000)
    with torch.no_grad():
        decoder.layers[0].up.weight += 1
    with pytest.raises(EngineError, match="build a new FastDecoder"):
        decode(quick, prompts, ChunkMethod(FixedChunk(1)), SAMPLING)


@pytest.mark.parametrize("width", [16, None])
def test_a_policy_in_training_decides_with_its_present_weights(decoder, prompts, width):
    """One FastDecoder, a policy that is updated between batches, and another one beside it."""
    quick, policy, other = FastDecoder(decoder), policy_of(width), policy_of(16)
    with torch.no_grad():
        policy.output.weight.mul_(0.2)  # so that log-probabilities of -50 do not ask for more digits than float32 has
    for turn in range(3):
        for chosen in (prompts, prompts[-1:]):
            for which, mode in ((policy, "sample"), (other, "greedy"), (policy, "greedy")):
                how = dict(seed=turn, record_hidden=True)
                same(decode(quick, chosen, ChunkMethod(PolicyChunk(which, mode)), SAMPLING, **how),
                     decode(decoder, chosen, ChunkMethod(PolicyChunk(which, mode)), SAMPLING, **how))
        with torch.no_grad():
            policy.output.weight.add_(0.2 * torch.randn_like(policy.output.weight))
            policy.layer.up.weight.mul_(1.5)
    forced = {p.utterance_id: [2, 3, 0] for p in prompts}
    method = ChunkMethod(PolicyChunk(policy, "sample", forced=forced))
    same(decode(quick, prompts, method, SAMPLING, group_size=3, record_hidden=True),
         decode(decoder, prompts, method, SAMPLING, group_size=3, record_hidden=True))


def test_fast_leaves_other_decoders_alone(decoder):
    class Other:
        layers = (torch.nn.Linear(2, 2),)

    other = Other()
    assert fast(other) is other
    quick = fast(decoder)
    assert isinstance(quick, FastDecoder) and fast(quick) is quick
    with pytest.raises(ConfigError, match="not a Other"):
        FastDecoder(other)


def test_a_comparison_gives_the_same_words_either_way(tmp_path):
    plain, quick = tiny_tools(), tiny_tools()
    quick.models.fast = True
    methods = ["far", "car-3", "dcar", "sd", "typical"]
    spoken = {}
    for name, tools in (("plain", plain), ("fast", quick)):
        compare(tiny_config(tmp_path / name, methods=methods, timing_utterances=1), tools)
        records = [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        spoken[name] = {(r["method"], r["seed"], r["id"]): (r["tokens"], r["accepted"]) for r in records
                        if "passes" in r}  # not the recordings
    assert spoken["plain"] == spoken["fast"]
    assert isinstance(quick.models.reader(quick.models.decoder), FastDecoder)
