"""What a GPU says is what the CPU says: on a GPU where there is one, else on the stand-in of tests/fake_gpu.py, on
which whoever mixes devices or waits within a captured step gets an error, as on a GPU."""

import fake_gpu
import pytest
import torch
from dcar.decoding.engine.run import engine_for
from dcar.decoding.fast import passes
from dcar.decoding.fast.passes import FastDecoder
from test_after_draw import scored_policy
from test_fast import NAMES, method
from test_static_engine import schedules
from tiny_decoders import tiny_decoder
from tiny_verifiers import imperfect_draft
from ways import policy_of, same

from dcar.decoding import ChunkMethod, PolicyChunk, Prompt, ShuffledChunk, decode
from dcar.model.companions import load_policy
from dcar.model.load import load_decoder
from dcar.sampling import SamplingConfig
from eval.methods.registry import Models, make_methods
from eval.speed.measure import Load
from heads.policy import ChunkPolicy

PROMPTS = [Prompt(f"u{i}", tuple(range(1, 4 + i)), tuple(range(1, 3 + i))) for i in (2, 3, 4)]
SAMPLING = SamplingConfig(temperature=0.9, top_k=8, max_tokens=16, max_tokens_per_text_unit=6, min_tokens=8)


def after_draw() -> ChunkPolicy:
    return scored_policy(tiny_decoder(), seed=1, chunk_scorer_width=16)


def here(results: list) -> list:
    for result in results:
        result.hidden = result.hidden.cpu()
        result.candidates = None if result.candidates is None else result.candidates.cpu()
    return results


def replayed() -> bool:
    return torch.cuda.is_available() or len(fake_gpu.replays) > 3


@pytest.mark.parametrize(("graphs", "batch", "chunks"), [(False, 2, "auto"), (True, 2, "auto"),
                                                         (True, 1, "exact"), (True, 3, "exact")])
@pytest.mark.parametrize("name", ["far", "car-3", "greedy", "sampled", "after the draw"])
def test_the_engine(device, name, graphs, batch, chunks):
    """Rows are replaced, and buffers used again by another seed: what was captured for the first rows, lengths and
    chunks serves the later ones."""
    def asked(policy):
        drawn = PolicyChunk(policy, "sample", num_candidates=3) if policy.config.after_draw else None
        return ChunkMethod(drawn or schedules(policy)[name])

    policy = after_draw() if name == "after the draw" else policy_of()
    expected = [decode(tiny_decoder(), PROMPTS, asked(policy), SAMPLING, seed=s, record_hidden=True) for s in (3, 4)]
    policy = policy.to(device)
    engine = engine_for(tiny_decoder().to(device), PROMPTS, SAMPLING, batch=batch, policy=policy, graphs=graphs,
                        chunks=chunks, sync_every=3, column_block=16)
    for seed, spoken in zip((3, 4), expected, strict=True):
        same(here(engine.decode(PROMPTS, asked(policy), SAMPLING, seed=seed, record_hidden=True)), spoken)
    assert replayed() or not graphs


@pytest.mark.parametrize("name", [*NAMES, "shuffled"])
def test_fast_passes_in_the_loop(device, name, monkeypatch):
    """Several batches of other sizes and lengths through one FastDecoder: the store grows, rows are selected in place,
    groups share a prefill, and what was captured for one batch serves the next. `ShuffledChunk` speaks its batch to the
    end before it begins: that took the store from the batch in flight."""
    monkeypatch.setattr(passes, "BLOCK", 16)  # several blocks of columns in these short utterances
    model, there = tiny_decoder(), tiny_decoder().to(device)
    draft, drafter = imperfect_draft(model), FastDecoder(imperfect_draft(tiny_decoder()).to(device), graphs=True)

    def asked(target, small, where=None):
        if name in ("dcar", "shuffled"):
            chosen = PolicyChunk(policy_of().to(where), "sample")
            return ChunkMethod(chosen if name == "dcar" else ShuffledChunk(chosen))
        return method(name, target, small)

    quick = FastDecoder(there, graphs=True)
    for chosen, how in ((PROMPTS[:1], {}), (PROMPTS, {}), (PROMPTS[:2], {"group_size": 2}), (PROMPTS[:1], {"seed": 5})):
        if name == "shuffled" and "group_size" in how:  # is for every utterance once
            continue
        same(here(decode(quick, chosen, asked(there, drafter, device), SAMPLING, record_hidden=True, **how)),
             decode(model, chosen, asked(model, draft), SAMPLING, record_hidden=True, **how))
    assert replayed() and len({key[0] for key in quick._inputs}) > 1  # batches of several sizes


def test_graphs_write_what_decisions_saw_where_it_is_read(device):
    """An engine that was asked for four candidates, for one, and for four again: the graphs of the first wrote to a
    buffer that was gone."""
    policy, model, graphs = after_draw(), tiny_decoder(), []
    asked = [ChunkMethod(PolicyChunk(policy, "sample", num_candidates=n)) for n in (4, 4, 1, 4)]
    expected = [decode(model, PROMPTS, each, SAMPLING, record_hidden=True) for each in asked]
    policy.to(device)
    engine = engine_for(tiny_decoder().to(device), PROMPTS, SAMPLING, batch=2, policy=policy, graphs=True)
    for each, spoken in zip(asked, expected, strict=True):
        same(here(engine.decode(PROMPTS, each, SAMPLING, record_hidden=True)), spoken)
        graphs.append(engine.graphs)
    assert replayed() and len(set(map(id, graphs))) == 3  # captured anew where their number changes, and only there


def test_the_stand_in_refuses_what_a_gpu_refuses(device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    there, graph = torch.arange(4.0).to(device), fake_gpu.Graph()
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        bool(there.sum() > 0)
    with torch.cuda.graph(graph := fake_gpu.Graph(), capture_error_mode="thread_local"):
        there.add_(1)
        made = there * 2
    assert there.tolist() == [0, 1, 2, 3]  # nothing is computed while it is captured
    graph.replay()
    assert there.tolist() == [1, 2, 3, 4] and made.isnan().all()  # and nothing that was made within stays


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["car-1", "car-10", "dcar", "dcar@n4", "sd@heads", "ssd-0.4", "pcg-0.42", "typical"])
def test_shipped_models_say_the_same_tokens(name):
    spoken = []
    for device in ("cpu", "cuda"):
        model = load_decoder("starter", device)
        models = Models(model, policies={"": load_policy("starter", device)}, fast=True)
        (entry,), load = make_methods([name], models), Load(40, 25, 120)
        results = decode(models.reader(model), load.prompts(model, 4), entry.build(), load.sampling(temperature=0.8))
        spoken.append([result.tokens for result in results])
    assert spoken[0] == spoken[1]
