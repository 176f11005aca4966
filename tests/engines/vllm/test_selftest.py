"""The proof at start that rows may move: what passes it, what is refused by name, and that it leaves no trace."""

from __future__ import annotations

import pytest
import torch

from engines.vllm.toy_experts import D, E, Layer, Method, RoutedExperts, expected, layers_in
from hotsplit.engines.vllm.selftest import Prover
from hotsplit.errors import UnsupportedEngineError


@pytest.fixture
def layer(tmp_path):
    """layer(module) -> loaded into ranges, and not yet proven."""
    with layers_in(tmp_path) as make:

        def load(module=None, **options):
            made = make(module, **options).create()
            made.module.load()
            made.memory.register(0, made.module.get_expert_weights())
            return made

        yield load


def prove(layer: Layer, prover: Prover | None = None):
    (prover or Prover()).prove(layer.module, memory=layer.memory, layer_id=0, rows=layer.rows)


def bytes_of(layer):
    return {name: one.tolist() for name, one in layer.module.named_parameters()}


class Watched(RoutedExperts):
    """Remembers what the proof asks for, and spoils its input as some kernels do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def forward_rows(self, x, topk_weights, row_ids):
        self.calls.append((x.clone(), topk_weights.clone(), row_ids.clone()))
        output = super().forward_rows(x, topk_weights, row_ids)
        x.zero_()
        return output


class ByPosition(RoutedExperts):
    """A kernel in which the number of a row plays a part."""

    def expert(self, x, row):
        return super().expert(x, row) * (1 + row)


class Blind(RoutedExperts):
    """A kernel that reads a copy of its own, made when it was loaded."""

    def load(self, experts=range(E)):
        super().load(experts)
        self.own = self.w13_weight.data.clone(), self.w2_weight.data.clone()

    def w13(self, row):
        return self.own[0][row]

    def w2(self, row):
        return self.own[1][row]


class Constant(RoutedExperts):
    """A kernel to which it is all the same what is chosen."""

    def forward_rows(self, x, topk_weights, row_ids):
        return x * topk_weights.sum(dim=1, keepdim=True)


class Bound(RoutedExperts):
    """A kernel with a table beside the weights, made for the rows as they were."""

    def load(self, experts=range(E)):
        super().load(experts)
        self.table = self.w2_bias.data.clone()

    def expert(self, x, row):
        return super().expert(x, row) + self.table[row].sum()


class AcrossRows(RoutedExperts):
    """A format in which the bytes of a row mean something beside those of the row before alone."""

    def w2(self, row):
        return self.w2_weight[row] + (self.w2_weight[row - 1] if row else 0)


@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_that_are_read_one_by_one_may_move(layer, dynamic):
    made = layer(dynamic=dynamic)
    prove(made)
    assert torch.equal(expected(), made.output)


@pytest.mark.parametrize("kind", [ByPosition, Blind, Bound, AcrossRows])
def test_an_output_that_depends_on_where_a_row_lies_is_refused_by_the_methods_name(layer, kind):
    made = layer(kind())
    with pytest.raises(
        UnsupportedEngineError, match="quantisation method Method: got an output that changed"
    ) as caught:
        prove(made)
    assert "--moe-backend" in str(caught.value)


def test_an_output_that_depends_on_nothing_that_was_moved_is_refused(layer):
    with pytest.raises(UnsupportedEngineError, match="Method: got an output that does not depend on the rows"):
        prove(layer(Constant()))


@pytest.mark.parametrize("kind", [RoutedExperts, ByPosition, Bound, Constant])
def test_every_byte_lies_where_it_was_afterwards_also_where_it_is_refused(layer, kind):
    made = layer(kind())
    before = bytes_of(made)
    try:
        prove(made)
    except UnsupportedEngineError:
        assert kind is not RoutedExperts
    assert before == bytes_of(made)


def test_every_expert_takes_part_and_each_run_has_the_same_tokens(layer):
    made = layer(Watched())
    prove(made)
    (x, weights, ids), *others = made.module.calls
    assert 4 == len(made.module.calls)
    assert (16, D) == tuple(x.shape)
    assert set(made.rows.row_map) == set(ids.flatten().tolist())
    assert torch.int32 == ids.dtype
    assert all(torch.equal(x, one) and torch.equal(weights, other) for one, other, _ in others)
    a, b = min(made.rows.row_map), max(made.rows.row_map)
    mapped = [{a: b, b: a}.get(row, row) for row in ids.flatten().tolist()]
    assert [mapped] == [one.flatten().tolist() for _, _, one in others if not torch.equal(one, ids)]


def test_ids_have_the_type_that_the_method_wants(layer):
    method = Method()
    method.topk_indices_dtype = torch.int64
    made = layer(Watched(method=method))
    prove(made)
    assert {torch.int64} == {ids.dtype for _, _, ids in made.module.calls}


def test_a_kind_of_layer_is_proven_once(layer):
    prover, made, other = Prover(), layer(Watched()), layer(Watched())
    prove(made, prover)
    prove(other, prover)
    assert (4, 0) == (len(made.module.calls), len(other.module.calls))


def test_a_layer_with_other_rows_is_of_another_kind(layer):
    prover, made, other = Prover(), layer(Watched()), layer(Watched())
    other.memory.register(0, other.module.get_expert_weights()[:2])
    prove(made, prover)
    with pytest.raises(UnsupportedEngineError, match="changed"):  # the bias was left out, so it does not move
        prove(other, prover)
    assert 4 == len(other.module.calls)


def test_a_kind_that_was_refused_is_not_taken_for_proven(layer):
    prover, made = Prover(), layer(ByPosition())
    for _ in range(2):
        with pytest.raises(UnsupportedEngineError):
            prove(made, prover)
