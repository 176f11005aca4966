from __future__ import annotations

import copy
import json
import math

import pytest

from hotsplit.errors import ConfigError, RatesError
from hotsplit.plan.rates import (
    GivenRates,
    HostRates,
    Machine,
    Rates,
    from_json,
    given_rates,
    is_plausible,
    load_rates,
    machine_of,
    save_rates,
    to_json,
)

GPU = {
    "index": 0,
    "name": "toy",
    "memory_bytes": 10**11,
    "hbm_bytes_per_s": 3e12,
    "dma_h2d_bytes_per_s": 2.6e10,
    "in_place_bytes_per_s": 2.4e10,
    "numa_node": 0,
}
HOST = {"memory_bytes_per_s": 2e11, "all_gpus_h2d_bytes_per_s": 7e10, "disk_bytes_per_s": 3e9}
FILE = {"format": "hotsplit-rates", "version": 1, "gpus": [GPU], "host": HOST, "measured": "2026-01-01T00:00:00Z"}


def changed(**change):
    """The file with members of its GPU or host replaced."""
    value = copy.deepcopy(FILE)
    for name, member in change.items():
        (value["host"] if name in HOST else value["gpus"][0])[name] = member
    return value


def test_every_member_of_the_file_is_read(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(FILE))
    rates = load_rates(path)
    assert GPU == {name: getattr(rates.gpus[0], name) for name in GPU}
    assert HOST == {name: getattr(rates.host, name) for name in HOST}
    assert "2026-01-01T00:00:00Z" == rates.measured


def test_what_was_not_measured_is_unknown_and_never_zero():
    absent = from_json({"format": "hotsplit-rates", "version": 1, "gpus": [{}]}, what="rates")
    null = from_json(changed(**dict.fromkeys([*GPU, *HOST][1:])), what="rates")
    for rates in (absent, null):
        assert None is rates.gpus[0].in_place_bytes_per_s
        assert None is rates.host.shared_bytes_per_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hbm_bytes_per_s", 3000),  # GB/s
        ("hbm_bytes_per_s", 3e15),
        ("in_place_bytes_per_s", 25),
        ("in_place_bytes_per_s", 25_000),  # MB/s
        ("in_place_bytes_per_s", 2e12),  # bits
        ("memory_bytes_per_s", 70),
        ("all_gpus_h2d_bytes_per_s", 100),
        ("disk_bytes_per_s", 7),
        ("hbm_bytes_per_s", 0),
        ("in_place_bytes_per_s", -1e10),
        ("in_place_bytes_per_s", math.nan),
        ("in_place_bytes_per_s", math.inf),
        ("in_place_bytes_per_s", True),
        ("in_place_bytes_per_s", "25 GB/s"),
    ],
)
def test_a_rate_in_another_unit_is_refused_by_name_and_the_unit_asked_for(name, value):
    with pytest.raises(RatesError, match=f"{name}: got .*wanted bytes per second.*check the unit") as caught:
        from_json(changed(**{name: value}), what="rates toy.json")
    assert name == caught.value.field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [1e8, 1e12])
def test_the_limits_of_a_link_are_allowed(rate):
    assert rate == from_json(changed(in_place_bytes_per_s=rate), what="rates").gpus[0].in_place_bytes_per_s


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "wanted a JSON object"),
        ({**FILE, "format": "rates"}, "wanted 'hotsplit-rates' version 1"),
        ({**FILE, "version": 2}, "version 2"),
        ({**FILE, "gpus": None}, "gpus: got None; wanted a list of GPUs, empty for a host without any"),
        ({**FILE, "gpus": {}}, "gpus: got"),
        ({**FILE, "gpus": [3]}, r"gpus\[0\]: got 3; wanted a JSON object"),
        ({**FILE, "speed": 1}, "unknown 'speed'"),
        (changed(link_gb=25), "unknown 'link_gb'"),
        (changed(memory_bytes=1.5), "memory_bytes: got 1.5"),
        (changed(index=-1), "index: got -1"),
        (changed(name=7), "name: got 7"),
        ({**FILE, "measured": 7}, "measured: got 7"),
        ({**FILE, "host": [1]}, "host: got"),
    ],
)
def test_a_malformed_file_is_refused_by_place(value, reason):
    with pytest.raises(RatesError, match=reason):
        from_json(value, what="rates toy.json")


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "rates.json").write_text("25 GB/s")
    with pytest.raises(RatesError, match="wanted JSON"):
        load_rates(tmp_path / "rates.json")


def test_ranks_take_the_gpus_in_order_and_share_the_lower_known_host_rate():
    other = {**GPU, "index": 1, "in_place_bytes_per_s": 1e10}
    rates = from_json({**FILE, "gpus": [GPU, other]}, what="rates")
    machine, notices = machine_of(rates, given=GivenRates(), ranks=2)
    expected = Machine(hbm_bytes_per_s=(3e12, 3e12), link_bytes_per_s=(2.4e10, 1e10), host_bytes_per_s=7e10)
    assert (expected, []) == (machine, notices)


def test_given_rates_beat_the_file():
    machine, _ = machine_of(from_json(FILE, what="rates"), given=given_rates(link=50, hbm=8000, host=90), ranks=1)
    assert (8e12,) == machine.hbm_bytes_per_s
    assert (5e10,) == machine.link_bytes_per_s
    assert 9e10 == machine.host_bytes_per_s


def test_one_gpu_stands_for_all_ranks_aloud():
    machine, notices = machine_of(from_json(FILE, what="rates"), given=GivenRates(), ranks=4)
    assert 4 == len(machine.link_bytes_per_s)
    assert ["one-gpu-for-all"] == [notice.name for notice in notices]


def test_three_gpus_for_four_ranks_are_refused():
    with pytest.raises(RatesError, match="got 3 GPUs; wanted 4"):
        machine_of(from_json({**FILE, "gpus": [GPU] * 3}, what="rates"), given=GivenRates(), ranks=4)


def test_the_rate_of_copies_stands_in_for_in_place_reads_aloud():
    machine, notices = machine_of(from_json(changed(in_place_bytes_per_s=None), what="r"), given=GivenRates(), ranks=1)
    assert (2.6e10,) == machine.link_bytes_per_s
    assert "copy-rate-stands-in" in [notice.name for notice in notices]


def test_an_unknown_host_rate_binds_nothing_and_is_said():
    machine, notices = machine_of(None, given=given_rates(link=25, hbm=3000, host=None), ranks=2)
    assert math.inf == machine.host_bytes_per_s
    assert ["host-rate-unknown"] == [notice.name for notice in notices]


@pytest.mark.parametrize(
    ("given", "option"), [({"link": 25.0}, "--hbm"), ({"hbm": 3000.0}, "--link"), ({}, "--hbm and --link")]
)
def test_without_a_rates_file_what_is_needed_is_said(given, option):
    rates = given_rates(link=given.get("link"), hbm=given.get("hbm"), host=None)
    with pytest.raises(RatesError, match=f"got unknown: .*; wanted .*--rates, or {option} in GB/s"):
        machine_of(None, given=rates, ranks=1)


@pytest.mark.parametrize("link", [25e9, 0.0, -25.0, math.nan, math.inf])
def test_a_link_that_is_no_number_of_gb_per_s_is_a_setting_error_that_names_the_unit(link):
    with pytest.raises(ConfigError, match=r"--link: got .*GB/s \(10\^9 bytes per second\)"):
        given_rates(link=link, hbm=None, host=None)


@pytest.mark.parametrize("rates", [((), ()), ((1e12,), ()), ((0.0,), (1e9,)), ((math.nan,), (1e9,))])
def test_a_machine_has_both_rates_of_every_rank(rates):
    with pytest.raises(RatesError):
        Machine(hbm_bytes_per_s=rates[0], link_bytes_per_s=rates[1])


BARE = {"format": "hotsplit-rates", "version": 1, "gpus": [], "host": dict.fromkeys(HOST), "measured": None}


def test_a_host_without_gpus_is_a_file_like_any_other(tmp_path):
    rates = from_json(BARE, what="rates")
    assert ((), None) == (rates.gpus, rates.host.shared_bytes_per_s)
    assert BARE == to_json(rates)


def test_a_forecast_from_a_file_without_gpus_says_all_that_is_missing():
    with pytest.raises(RatesError) as caught:
        machine_of(from_json(BARE, what="rates"), given=GivenRates(), ranks=2)
    text = str(caught.value)
    assert text.startswith("the rates file, which has no GPU: got unknown: hbm_bytes_per_s of GPU 0")
    assert 4 == len(caught.value.fields)
    assert "hotsplit probe -o" in text
    assert "or --hbm and --link in GB/s" in text


def test_many_missing_rates_are_counted():
    with pytest.raises(RatesError, match="of GPU 0, .* and 12 more; wanted"):
        machine_of(from_json(BARE, what="rates"), given=GivenRates(), ranks=8)


def test_given_rates_are_enough_beside_a_file_without_gpus():
    machine, notices = machine_of(from_json(BARE, what="r"), given=given_rates(link=25, hbm=3000, host=None), ranks=2)
    assert (2.5e10, 2.5e10) == machine.link_bytes_per_s
    assert ["host-rate-unknown"] == [notice.name for notice in notices]


def test_one_gpu_that_is_unknown_among_others_is_named():
    rates = from_json({**FILE, "gpus": [GPU, {"index": 1, "hbm_bytes_per_s": 3e12}]}, what="rates")
    with pytest.raises(RatesError, match="rates of this machine: got unknown: in_place_bytes_per_s of GPU 1; wanted"):
        machine_of(rates, given=GivenRates(), ranks=2)


def test_what_is_saved_is_read_back(tmp_path):
    rates = from_json(FILE, what="rates")
    save_rates(rates, tmp_path / "rates.json")
    assert rates == load_rates(tmp_path / "rates.json")


def test_a_rate_that_no_thing_can_have_is_not_saved_and_the_file_before_stays(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text("before")
    with pytest.raises(RatesError, match="disk_bytes_per_s"):
        save_rates(Rates(gpus=(), host=HostRates(disk_bytes_per_s=1.0)), path)
    assert "before" == path.read_text()
    assert not is_plausible("disk_bytes_per_s", 1.0)
