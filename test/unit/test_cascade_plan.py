"""Index arrays of the cascade, followed by hand against plain attention: what FlashInfer and our kernels are told."""

import numpy as np
import pytest
import torch

from granikv_kernels.cascade import (
    extent_slots_reference,
    gather_rows_reference,
    merge_listed_reference,
    tail_slots_reference,
)
from granikv_kernels.grouped_decode import grouped_decode_reference
from granikv_sglang.backends import Geometry
from granikv_sglang.backends.cascade_plan import (
    LEVELS,
    CascadeCapacity,
    PassLimits,
    cascade_takes,
    largest_arrays,
    prefix_arrays,
    tail_indptr,
)
from granikv_sglang.core import Span
from granikv_sglang.plan import Item, build_items, coverage_of

TEAM, ROLE, OTHER, ALONE = (1, Span(256, 90)), (2, Span(515, 33)), (3, Span(700, 1)), (4, Span(900, 50))
PATHS = [
    [(TEAM,)] * 4,
    [(TEAM, ROLE), (OTHER,), (TEAM,), (TEAM, ROLE), (), (OTHER,)],
    [(OTHER,), (ALONE,), (OTHER,), (TEAM, ROLE), (TEAM, ROLE, ALONE)],
]


def numbers(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values))


def paged_attention(q, k_cache, v_cache, qo_indptr, kv_indptr, slots, scale):
    """What FlashInfer computes: all queries of a request against all its slots, no mask; the LSE in base 2."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float64)
    gqa = q.shape[1] // k_cache.shape[1]
    for request in range(len(qo_indptr) - 1):
        own = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        at = slots[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        k, v = (x[at].double().repeat_interleave(gqa, dim=1) for x in (k_cache, v_cache))
        scores = torch.einsum("qhd,nhd->qhn", q[own].double(), k) * scale
        out[own] = torch.einsum("qhn,nhd->qhd", torch.softmax(scores, -1), v)
        lse[own] = torch.logsumexp(scores, -1) / np.log(2.0)
    return out, lse


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_pass_followed_by_hand_is_attention(paths, padding):
    """Prefix pass, tail pass and merge, each by its reference, from the arrays alone; rows past the plan are padded."""
    torch.manual_seed(3)
    items, n = build_items(paths), len(paths)
    coverage, rows = coverage_of(items, n).astype(np.int32), n + padding
    limits = PassLimits(rows)
    arrays = prefix_arrays(items, limits)
    tails = torch.tensor([1 + 5 * i for i in range(n)] + [1] * padding)
    lens = tails + torch.cat([numbers(coverage), torch.zeros(padding, dtype=torch.int32)])
    table = torch.randint(1000, 1400, (rows + 1, 300), dtype=torch.int32)
    request = torch.randperm(rows + 1)[:rows]
    k_cache, v_cache, q = torch.randn(1400, 2, 16), torch.randn(1400, 2, 16), torch.randn(rows, 6, 16)

    slots = extent_slots_reference(numbers(arrays.starts), numbers(arrays.kv_indptr))
    assert slots.shape[0] == arrays.slots
    queries = gather_rows_reference(q, numbers(arrays.pair_row), arrays.pairs)
    part_out = torch.full((limits.pairs + rows, 6, 16), float("nan"), dtype=torch.float64)
    part_lse = torch.full((limits.pairs + rows, 6), float("nan"), dtype=torch.float64)
    part_out[: arrays.pairs], part_lse[: arrays.pairs] = paged_attention(
        queries, k_cache, v_cache, arrays.qo_indptr, arrays.kv_indptr, slots, 0.3
    )
    kv_indptr = tail_indptr(lens.numpy(), coverage, rows)
    full = np.zeros(rows, np.int32)
    full[:n] = coverage
    own = tail_slots_reference(table, request, numbers(full), numbers(kv_indptr))
    part_out[limits.pairs :], part_lse[limits.pairs :] = paged_attention(
        q, k_cache, v_cache, np.arange(rows + 1), kv_indptr, own, 0.3
    )
    out, lse = merge_listed_reference(numbers(arrays.list_ptr), numbers(arrays.list_part), part_out, part_lse)

    plain = [(item.start, item.tokens, item.rows) for item in items]
    expected, expected_lse = grouped_decode_reference(
        plain, coverage, q.double(), k_cache.double(), v_cache.double(), table, request, lens, 0.3
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse * np.log(2.0), expected_lse)


def test_items_beyond_those_in_use_are_empty_and_empty_items_are_left_out():
    limits = PassLimits(8, 9)
    items = [Item(300, 0, (0, 1), 1), Item(512, 7, (2, 5), 2), Item(100, 3, (), 3), Item(70, 4, (5, 6, 7), 4)]
    arrays = prefix_arrays(items, limits)
    assert arrays.qo_indptr.tolist() == [0, 2, 5, 5, 5, 5, 5, 5, 5]
    assert arrays.kv_indptr.tolist() == [0, 7, 11, 11, 11, 11, 11, 11, 11]
    assert arrays.starts.tolist() == [512, 70, 0, 0, 0, 0, 0, 0]
    assert arrays.pair_row.tolist() == [2, 5, 5, 6, 7]
    assert arrays.list_ptr.tolist() == [0, 1, 2, 4, 5, 6, 9, 11, 13]
    # Row 5 is in both items; state 24 + r is the tail of row r.
    assert arrays.list_part[6:9].tolist() == [1, 2, 29]
    assert all(x.dtype == np.int32 for x in vars(arrays).values())


@pytest.mark.parametrize("gqa", [1, 3, 4, 8, 71])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 160])
def test_the_largest_pass_uses_every_pair_and_merges_tails_only(rows, gqa):
    limits = PassLimits(rows, gqa)
    arrays = largest_arrays(limits)
    assert (arrays.pairs, arrays.qo_indptr[-1], arrays.slots) == (LEVELS * rows, LEVELS * rows, 1)
    assert extent_slots_reference(numbers(arrays.starts), numbers(arrays.kv_indptr)).tolist() == [0]
    assert arrays.list_ptr.tolist() == list(range(rows + 1))
    assert arrays.list_part.tolist() == [limits.pairs + r for r in range(rows)]
    # FlashInfer derives its tile from pairs - items + 1, unsigned.
    assert limits.items <= limits.requests <= limits.pairs


@pytest.mark.parametrize(
    ("rows", "gqa", "tile"),
    [
        (1, 4, 16),
        (4, 4, 16),
        (5, 4, 64),
        (16, 4, 64),
        (17, 4, 128),
        (64, 4, 128),
        (8, 8, 64),
        (64, 1, 64),
        (2, 71, 128),
    ],
)
def test_small_batches_get_a_small_tile(rows, gqa, tile):
    """FlashInfer's rule for graphs, FA2DetermineCtaTileQ: above 64 rows 128, above 16 rows 64, else 16."""
    limits = PassLimits(rows, gqa)
    most = gqa * (limits.pairs - limits.requests + 1)
    assert (128 if most > 64 else 64 if most > 16 else 16) == tile
    # An item of all rows is one tile then, but for the largest.
    assert most >= min(rows * gqa, tile) or limits.requests == limits.items


@pytest.mark.parametrize("gqa", [1, 4])
def test_shapes_do_not_depend_on_the_plan(gqa):
    """What a graph was captured with, it must be replayed with."""
    limits = PassLimits(6, gqa)
    small, large = (prefix_arrays(build_items(paths), limits) for paths in PATHS[:2])
    for name in ("qo_indptr", "kv_indptr", "starts", "list_ptr"):
        shapes = {getattr(arrays, name).shape for arrays in (small, large, largest_arrays(limits))}
        assert len(shapes) == 1, name


def test_tails_of_rows_past_the_batch_are_empty():
    lens = np.array([10, 5, 3], np.int64)
    assert tail_indptr(lens, np.array([9, 5], np.int32), 5).tolist() == [0, 1, 1, 4, 4, 4]
    assert lens.tolist() == [10, 5, 3]


def test_refusals():
    limits = PassLimits(4)
    with pytest.raises(ValueError, match="5 items"):
        prefix_arrays([Item(256 * i, 4, (0,), i) for i in range(5)], limits)
    with pytest.raises(ValueError, match="13 members"):
        prefix_arrays([Item(0, 4, (0,) * 13, 1)], limits)
    with pytest.raises(ValueError, match="row 4"):
        prefix_arrays([Item(0, 4, (1, 4), 1)], limits)


def test_capacity_goes_by_the_rows_of_the_batch():
    capacity = CascadeCapacity.of(256)
    groups = [Item(256 * i, 100, tuple(range(4 * i, 4 * i + 4)), i) for i in range(64)]
    assert capacity.holds(256, groups)
    assert not capacity.holds(257, groups)
    assert not capacity.holds(64, groups)
    everybody = Item(0, 100, tuple(range(8)), 1)
    assert capacity.holds(8, [everybody] * LEVELS)
    assert not capacity.holds(8, [everybody] * (LEVELS + 1))
    # A graph for more rows than the plan has, as padding makes, holds no less.
    assert all(PassLimits(n).items <= PassLimits(n + 1).items for n in range(1, 300))


@pytest.mark.parametrize(
    ("dtype", "dim", "takes"),
    [
        (torch.bfloat16, 128, True),
        (torch.float16, 64, True),
        (torch.float32, 128, False),
        (torch.bfloat16, 80, False),
    ],
)
def test_models_it_has_kernels_for(dtype, dim, takes):
    assert cascade_takes(Geometry(8, 2, dim, dtype, torch.device("cpu"))) is takes
