"""Similarity groups of PCG: against brute force, by blocks, both ways, on disk, refused where
they do not belong."""

import pytest
import torch

from dcar.errors import ConfigError
from eval.verifiers import pcg as groups_module
from eval.verifiers.pcg import TokenGroups, build_groups


def embedding_of(codes: int = 40, width: int = 6, seed: int = 0) -> torch.Tensor:
    table = torch.randn(codes, width, generator=torch.Generator().manual_seed(seed))
    table[7] = 2 * table[3]  # the same direction: the same group, to be stored once
    return table


def sets_of(groups: TokenGroups) -> list[tuple[int, ...]]:
    return [
        tuple(groups.group_tokens[a:b].tolist())
        for a, b in zip(groups.group_start, groups.group_start[1:], strict=False)
    ]


def brute_force(embedding: torch.Tensor, theta: float) -> set[tuple[int, ...]]:
    unit = embedding.double() / embedding.double().norm(dim=1, keepdim=True)
    cosine = unit @ unit.T
    return {
        tuple(j for j in range(len(unit)) if j == i or float(cosine[i, j]) > theta)
        for i in range(len(unit))
    }


@pytest.mark.parametrize("theta", [-0.5, 0.0, 0.3, 0.42, 0.9])
def test_groups_equal_brute_force(theta):
    groups = build_groups(embedding_of(), theta)
    found = sets_of(groups)
    assert set(found) == brute_force(embedding_of(), theta) | {(40,)}
    assert len(found) == len(set(found))  # duplicates are merged
    assert len(groups.token_start) == 42 and groups.count == len(found)


@pytest.mark.parametrize("theta", [-0.5, 0.42])
def test_both_ways_agree(theta):
    groups = build_groups(embedding_of(), theta, specials=2)
    found = sets_of(groups)
    for token in range(len(groups.token_start) - 1):
        mine = groups.token_groups[
            groups.token_start[token] : groups.token_start[token + 1]
        ].tolist()
        assert mine == [k for k, ids in enumerate(found) if token in ids]
        assert float(groups.share[token]) == 1 / len(mine)
    assert found[-2:] == [(40,), (41,)]  # EOS and other specials keep to themselves
    assert all(max(ids) < 40 for ids in found[:-2])


def test_extremes_of_theta():
    table = embedding_of()
    # nothing is more alike than the same; 3 and 7 are not merged
    assert build_groups(table, 1.0).count == 41
    assert sets_of(build_groups(table.abs(), -0.99)) == [tuple(range(40)), (40,)]


def test_groups_that_would_not_fit_are_refused():
    table = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="theta .*memory_bytes"):
        build_groups(table, 0.0, memory_bytes=600 * groups_module.BYTES_PER_CELL * 2)


def test_half_precision_embeddings_give_the_groups_of_their_values():
    table = embedding_of().half()
    assert sets_of(build_groups(table, 0.3)) == sets_of(build_groups(table.float(), 0.3))
