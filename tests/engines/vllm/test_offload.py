"""vLLM's offload flags: off while its configuration is made, told to the budget, and left as the user gave them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hotsplit.engines.vllm.budget import OffloadFlags
from hotsplit.engines.vllm.offload import as_flags, taken_over
from hotsplit.errors import UnsupportedEngineError


@dataclasses.dataclass
class Arguments:
    """vLLM's, as far as they matter; both kinds of defaults occur there."""

    model: str = "tiny"
    offload_backend: str = "auto"
    cpu_offload_gb: float = 0
    cpu_offload_params: set[str] = dataclasses.field(default_factory=set)
    offload_group_size: int = 0
    offload_num_in_group: int = 1
    offload_prefetch_step: int = 1
    offload_params: set[str] = dataclasses.field(default_factory=set)


GIVEN = {"cpu_offload_gb": 4.5, "cpu_offload_params": {"w2", "experts", "w13"}, "offload_backend": "uva"}


def test_flags_are_off_inside_and_as_given_afterwards():
    arguments = Arguments(**GIVEN)
    with taken_over(arguments):
        assert Arguments() == arguments
    assert Arguments(**GIVEN) == arguments


def test_flags_are_as_given_after_an_error_too():
    arguments = Arguments(**GIVEN)
    with pytest.raises(ValueError, match="no such model"), taken_over(arguments):
        raise ValueError("no such model")
    assert Arguments(**GIVEN) == arguments


def test_only_flags_that_were_given_are_told_in_types_that_json_knows():
    with taken_over(Arguments(**GIVEN)) as told:
        assert {
            "cpu_offload_gb": 4.5,
            "cpu_offload_params": ["experts", "w13", "w2"],
            "offload_backend": "uva",
        } == json.loads(json.dumps(told))


def test_the_order_of_a_set_does_not_matter():
    first, second = Arguments(offload_params={"b", "a"}), Arguments(offload_params={"a", "b"})
    with taken_over(first) as one, taken_over(second) as other:
        assert json.dumps(one) == json.dumps(other)


def test_without_flags_nothing_is_told_and_nothing_said(caplog):
    arguments = Arguments(model="other")
    with taken_over(arguments) as told:
        assert ({}, "other") == (told, arguments.model)
    assert [] == caplog.messages


def test_taking_flags_over_is_said_by_their_names(caplog):
    with taken_over(Arguments(offload_group_size=4, cpu_offload_gb=1)):
        pass
    (message,) = caplog.messages
    assert "takes over from vLLM's offloader: --cpu-offload-gb, --offload-group-size set the default" in message


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, OffloadFlags()),
        ({"cpu_offload_gb": 4.5}, OffloadFlags(cpu_offload_gb=4.5)),
        (
            {"cpu_offload_gb": 1, "cpu_offload_params": ["a", "b"]},
            OffloadFlags(cpu_offload_gb=1, cpu_offload_params=frozenset({"a", "b"})),
        ),
        (
            {"offload_backend": "prefetch", "offload_group_size": 4, "offload_num_in_group": 2},
            OffloadFlags(backend="prefetch", group_size=4, num_in_group=2),
        ),
        (
            {"offload_group_size": 4, "offload_prefetch_step": 2, "offload_params": ["a"]},
            OffloadFlags(group_size=4, prefetch_step=2, params=frozenset({"a"})),
        ),
    ],
)
def test_what_is_told_is_what_the_budget_reads(given, flags):
    assert flags == as_flags(given)


def test_the_flags_of_any_arguments_reach_the_budget():
    with taken_over(Arguments(**GIVEN)) as told:
        flags = as_flags(json.loads(json.dumps(told)))
    assert (
        OffloadFlags(backend="uva", cpu_offload_gb=4.5, cpu_offload_params=frozenset({"w2", "experts", "w13"})) == flags
    )


def test_an_unknown_backend_is_refused():
    with pytest.raises(UnsupportedEngineError, match="--offload-backend: got 'disk'"):
        as_flags({"offload_backend": "disk"})


@pytest.mark.vllm
def test_every_flag_is_an_argument_of_vllm_with_the_default_of_the_budget(tiny_moe):
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    arguments = arg_utils.EngineArgs(model=str(tiny_moe))
    flags = {field.name for field in dataclasses.fields(Arguments)} - {"model"}
    assert flags <= {field.name for field in dataclasses.fields(arguments)}
    assert OffloadFlags() == as_flags({name: getattr(arguments, name) for name in flags})
    with taken_over(arguments) as told:
        assert {} == told
