"""A layer seen through a bank: every tensor of all rows is replaced wherever it is kept, and nothing else is copied."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotsplit.engines.vllm.bank_views import BankTensors, bank_view, copied, expert_map, held_by, turned

R, FIRST = 7, 3
Pair = namedtuple("Pair", "scale other")


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: Any
    name: str = "frozen"


@dataclass(slots=True)
class Slotted:
    inner: Any
    flag: bool = True


class Kind(enum.Enum):
    A = 1


def tail(tensor):
    return tensor[FIRST:]


def rows():
    return torch.arange(R, dtype=torch.float32)


def copy_of(root):
    return copied(root, replace=lambda tensor: tensor[FIRST:] if len(tensor) == R else tensor, num_rows=R)


HOLDERS = {
    "a namespace": (lambda x: SimpleNamespace(x=x), lambda one: one.x),
    "a list": (lambda x: SimpleNamespace(x=[1, x]), lambda one: one.x[1]),
    "a tuple": (lambda x: SimpleNamespace(x=(x, 1)), lambda one: one.x[0]),
    "a named tuple": (lambda x: SimpleNamespace(x=Pair(x, 1)), lambda one: one.x.scale),
    "a dict": (lambda x: SimpleNamespace(x={"a": x}), lambda one: one.x["a"]),
    "an ordered dict": (lambda x: SimpleNamespace(x=OrderedDict(a=x)), lambda one: one.x["a"]),
    "a frozen dataclass with slots": (lambda x: SimpleNamespace(x=Frozen(x)), lambda one: one.x.scale),
    "six levels": (
        lambda x: SimpleNamespace(a=Slotted(SimpleNamespace(b=[Slotted({"c": Frozen(x)})]))),
        lambda one: one.a.inner.b[0].inner["c"].scale,
    ),
}


@pytest.mark.parametrize(("make", "look"), HOLDERS.values(), ids=HOLDERS)
def test_a_tensor_of_all_rows_is_replaced_wherever_it_is_kept_and_the_original_keeps_its_own(make, look):
    root = make(rows())
    made = copy_of(root)
    assert [3, 4, 5, 6] == look(made).tolist()
    assert R == len(look(root))
    assert type(root) is type(made)


def test_what_leads_to_no_tensor_of_all_rows_is_shared():
    other = SimpleNamespace(scale=torch.ones(R + 1), zero=torch.tensor(0.0))
    root = SimpleNamespace(scale=rows(), other=other, settings={"a": [1]}, kind=Kind.A, maker=torch.empty, cls=Frozen)
    made = copy_of(root)
    assert made is not root
    for name in ("other", "settings", "kind", "maker", "cls"):
        assert getattr(made, name) is getattr(root, name)
    assert other is copy_of(other)


def test_objects_that_lead_back_to_each_other_are_copied_once():
    kernel = SimpleNamespace(scale=rows())
    root = SimpleNamespace(kernel=kernel, again=[kernel])
    kernel.method, root.itself = root, root
    made = copy_of(root)
    assert made.kernel.method is made.itself is made
    assert made.again[0] is made.kernel is not kernel


def test_an_object_that_holds_none_itself_is_copied_where_it_leads_back_to_one_that_does():
    root = SimpleNamespace(scale=rows())
    root.helper = SimpleNamespace(method=root)
    made = copy_of(root)
    assert made.helper.method is made


class Bound:
    def __init__(self):
        self.scale = rows()
        self.forward = self.apply

    def apply(self):
        return self.scale


def test_a_bound_method_is_bound_to_the_copy():
    root = Bound()
    made = copy_of(root)
    assert (4, 7) == (len(made.forward()), len(root.forward()))


class ModuleMethod(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Frozen(rows())
        self.layer = torch.nn.Linear(R, R)
        self.register_buffer("table", rows())


def test_a_method_that_is_a_module_is_copied_and_modules_below_it_are_not():
    root = ModuleMethod()
    made = copy_of(root)
    assert (4, 4, 7, 7) == (len(made.config.scale), len(made.table), len(root.config.scale), len(root.table))
    assert made.layer is root.layer


def test_attributes_that_lead_to_tensors_of_all_rows_are_named():
    root = SimpleNamespace(scale=rows(), kernel=Slotted([rows()]), other=torch.ones(3), text="a", more=[torch.ones(2)])
    assert ["scale", "kernel"] == held_by(root, num_rows=R)


# A view of a layer.


class Layer(torch.nn.Module):
    def __init__(self, method):
        super().__init__()
        self.register_parameter("weight", torch.nn.Parameter(torch.randn(R, 4), requires_grad=False))
        self.register_parameter("common", torch.nn.Parameter(torch.ones(2), requires_grad=False))
        self.register_parameter("absent", None)
        self.register_buffer("_expert_map", None)
        self.quant_method, self.name = method, "a"
        self.global_num_experts = self.local_num_experts = 99


def view_of(layer, **options):
    options = {"replace": tail, "num_rows": R, "num_local": R - FIRST, "map_R": torch.zeros(R)} | options
    return bank_view(layer, **options)


@pytest.mark.parametrize("method", [SimpleNamespace(config=None), ModuleMethod()], ids=["an object", "a module"])
def test_a_view_is_the_same_layer_with_other_tensors(method):
    layer = Layer(method)
    method.config = SimpleNamespace(bias=layer.weight)
    view = view_of(layer)
    assert type(view) is Layer
    assert (4, R, R - FIRST, "a") == (len(view.weight), view.global_num_experts, view.local_num_experts, view.name)
    assert (99, None, R) == (layer.local_num_experts, layer._expert_map, len(layer.weight))
    assert view.quant_method.config.bias is view.weight, "one tensor is replaced by one, wherever it is met"
    assert layer.quant_method is method
    assert (view.common is layer.common, view.absent, R) == (True, None, len(view._expert_map))
    assert isinstance(view.weight, torch.nn.Parameter)


def test_marks_that_kernels_look_for_go_over_to_the_part():
    layer = Layer(SimpleNamespace())
    layer.weight.is_shuffled = True
    assert view_of(layer).weight.is_shuffled is True


def test_what_is_assigned_to_a_view_stays_with_it():
    layer = Layer(SimpleNamespace())
    view = view_of(layer)
    view.register_parameter("weight", None)
    view.register_buffer("more", torch.ones(1))
    view.name = "b"
    assert (R, "a", False) == (len(layer.weight), layer.name, hasattr(layer, "more"))


# Tensors of a bank.


def bytes_of(tensor):
    return tensor.view(len(tensor), -1).view(torch.uint8)


def test_rows_that_lie_apart_are_found_there_by_every_view_of_the_whole():
    whole = torch.arange(R * 6, dtype=torch.float32).view(R, 3, 2)
    part = (whole[FIRST:] + 100).clone()
    replace = BankTensors(FIRST, R, apart=[(bytes_of(whole), bytes_of(part))])
    for look in (
        lambda one: one,
        lambda one: one.transpose(1, 2),
        lambda one: one[:, 1:],
        lambda one: one.view(torch.int32),
        lambda one: one.view(torch.int16),
        lambda one: one.flatten(1).view(torch.uint8),
        lambda one: one[:, 2, 1],
    ):
        made = replace(look(whole))
        assert torch.equal(look(part), made)
        assert (look(whole).stride(), look(whole).dtype) == (made.stride(), made.dtype)
        assert part.data_ptr() <= made.data_ptr() < part.data_ptr() + part.nbytes


def test_rows_of_other_tensors_are_taken_from_the_tensor_itself():
    whole, small = torch.zeros(R, 4), torch.arange(2.0 * R).view(R, 2)
    replace = BankTensors(0, FIRST, apart=[(bytes_of(whole), bytes_of(torch.ones(FIRST, 4)))])
    made = replace(small)
    assert (small.data_ptr(), (FIRST, 2)) == (made.data_ptr(), tuple(made.shape))
    one_for_all = torch.tensor(5.0).expand(R)
    assert [5.0] * FIRST == replace(one_for_all).tolist()


def test_a_turned_copy_begins_with_the_banks_rows_and_keeps_strides_and_type():
    whole = torch.arange(R * 6, dtype=torch.float32).view(R, 3, 2).transpose(1, 2).to(torch.float8_e4m3fn)
    whole = whole.contiguous().transpose(1, 2)
    made = turned(whole, first=FIRST)
    assert (whole.stride(), whole.dtype) == (made.stride(), made.dtype)
    order = [3, 4, 5, 6, 0, 1, 2]
    assert torch.equal(whole.float()[order], made.float())
    one_for_all = torch.tensor(5.0).expand(R)
    assert one_for_all is turned(one_for_all, first=FIRST)


@pytest.mark.parametrize(
    ("first", "past", "expected"), [(0, 3, [0, 1, 2, -1, -1]), (3, 5, [-1, -1, -1, 0, 1]), (0, 0, [-1] * 5)]
)
def test_a_map_names_rows_inside_the_bank(first, past, expected):
    made = expert_map(first, past, num_rows=5, device=torch.device("cpu"))
    assert (torch.int32, expected) == (made.dtype, made.tolist())
