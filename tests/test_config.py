"""Settings: what is allowed, what is refused and how, and where each value comes from."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.config import HotsplitConfig, as_written, settings
from hotsplit.errors import ConfigError

# The table of the design, typed in once more: what is allowed, the default, and values that must be refused.
NUMBERS_REFUSED = [
    "nan",
    "inf",
    "-inf",
    "Infinity",
    "1e400",
    "1_000",
    "0x10",
    "1,5",
    "five",
    "1 2",
    "\u0665",
    "--1",
    ".",
]
INTEGERS_REFUSED = ["0", "-1", "1.0", "2e3", "1_000", "nan", "inf", "two", "\u0665", "9" * 5000]
SWITCHES_REFUSED = ["true", "True", "false", "yes", "on", "off", "2", "-1", "1.0", "01"]
TABLE = {
    "HOT_GIB": (None, ["0", "0.5", "96", "1e3", ".5", "5.", "+5"], ["-1", "-0.001", *NUMBERS_REFUSED]),
    "DYNAMIC": (True, ["0", "1"], SWITCHES_REFUSED),
    "DYN_STEPS": (2000, ["1", "2000", "1000000000000"], INTEGERS_REFUSED),
    "DYN_MAX_SWAPS": (2, ["1", "40"], INTEGERS_REFUSED),
    "DYN_MARGIN": (1.25, ["1", "1.25", "1e9"], ["0.9", "0.999999", "0", "-2", *NUMBERS_REFUSED]),
    "VRAM_RESERVE_GIB": (2.0, ["0", "2", "0.25"], ["-1", *NUMBERS_REFUSED]),
    "NUMA_POLICY": ("preferred", ["preferred", "bind", "off"], ["Preferred", "prefer", "0", "interleave"]),
    "ENABLE": (None, ["0", "1"], SWITCHES_REFUSED),
    "COUNTS": (None, ["counts.json", "/tmp/olmoe.json#book"], []),
    "PLAN": (None, ["plan.json"], []),
    "LEARNED": ("use", ["use", "ignore"], ["0", "1", "yes", "IGNORE"]),
    "STATE_DIR": (None, ["state"], []),
    "OBJECTIVE": ("share", ["share", "time"], ["tokens", "1"]),
    "STRICT": (False, ["0", "1"], SWITCHES_REFUSED),
    "DYN_HALF_LIFE": (10.0, ["0.1", "10", "1e6"], ["0", "0.0", "-1", *NUMBERS_REFUSED]),
    "DYN_SCHEDULE": ("fixed", ["fixed", "adaptive"], ["none", "Adaptive"]),
    "KERNEL": ("exact", ["exact", "fast"], ["slow", "Fast"]),
    "BANK_DIR": (None, ["banks"], []),
}
ALLOWED = [(name, text) for name, (_, allowed, _) in TABLE.items() for text in allowed]
REFUSED = [(name, text) for name, (_, _, refused) in TABLE.items() for text in refused]


def from_variable(name, text):
    return HotsplitConfig.from_env({f"HOTSPLIT_{name}": text})


def test_the_settings_are_those_of_the_table_in_its_order():
    assert [f"HOTSPLIT_{name}" for name in TABLE] == [info.variable for info in settings()]


def test_every_default_is_that_of_the_table():
    config = HotsplitConfig.from_env({})
    assert {name: default for name, (default, _, _) in TABLE.items()} == {
        name: getattr(config, name.lower()) for name in TABLE
    }


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_an_allowed_value_is_taken_from_the_environment_and_as_an_option_alike(name, text):
    from_environment = from_variable(name, text)
    as_option = HotsplitConfig.from_options({}, **{name.lower(): text})
    assert getattr(from_environment, name.lower()) == getattr(as_option, name.lower())
    assert ("environment", "option") == (from_environment.origin(name.lower()), as_option.origin(name.lower()))


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_bad_variable_is_refused_with_its_name_value_and_range_on_one_line(name, text):
    values = next(info.values for info in settings() if info.variable == f"HOTSPLIT_{name}").split(", adaptive")[0]
    with pytest.raises(ConfigError) as caught:
        from_variable(name, text)
    message = str(caught.value)
    assert (f"HOTSPLIT_{name}", text, "environment") == (
        caught.value.setting,
        caught.value.value,
        caught.value.origin,
    )
    assert f"HOTSPLIT_{name}: got " in message
    assert f"wanted {values.split(', fast')[0]};" in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_bad_option_is_refused_even_where_the_environment_has_a_good_value(name, text):
    allowed = TABLE[name][1][0]
    option = f"--{name.lower().replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"^{name.lower()} \({option}\): got "):
        HotsplitConfig.from_options({f"HOTSPLIT_{name}": allowed}, **{name.lower(): text})


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_an_empty_or_blank_variable_is_the_same_as_none(name, blank):
    config = from_variable(name, blank)
    assert HotsplitConfig.from_env({}) == config
    assert "default" == config.origin(name.lower())
    assert not config.is_on


@pytest.mark.parametrize(
    ("name", "padded", "value"), [("DYN_STEPS", " 5 ", 5), ("HOT_GIB", "\t5\n", 5.0), ("DYNAMIC", " 0", False)]
)
def test_blanks_around_a_value_are_ignored(name, padded, value):
    assert value == getattr(from_variable(name, padded), name.lower())


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"hot_gib": 3}, "hot_gib", 3.0),
        ({"hot_gib": 0.1}, "hot_gib", 0.1),
        ({"hot_gib": -0.0}, "hot_gib", 0.0),
        ({"dynamic": False}, "dynamic", False),
        ({"dynamic": 0}, "dynamic", False),
        ({"dyn_steps": 7}, "dyn_steps", 7),
        ({"counts": Path("a") / "b.json"}, "counts", "a/b.json"),
        ({"plan": "p.json"}, "plan", Path("p.json")),
    ],
)
def test_options_take_python_values(options, name, value):
    got = getattr(HotsplitConfig.from_options({}, **options), name)
    assert (value, type(value)) == (got, type(got))


@pytest.mark.parametrize(
    "options",
    [
        {"hot_gib": math.nan},
        {"hot_gib": math.inf},
        {"hot_gib": True},
        {"hot_gib": [1]},
        {"hot_gib": 1j},
        {"dyn_steps": 2.0},
        {"dyn_steps": True},
        {"dynamic": 2},
        {"dynamic": 1.0},
        {"plan": 3},
        {"counts": b"counts.json"},
        {"objective": 1},
    ],
)
def test_options_refuse_python_values_of_another_kind(options):
    (name,) = options
    with pytest.raises(ConfigError, match=rf"^{name} \(--"):
        HotsplitConfig.from_options({}, **options)
    with pytest.raises(ConfigError, match=rf"^{name} \(--"):
        HotsplitConfig(**options)


def test_a_none_is_refused_where_there_is_always_a_value():
    with pytest.raises(ConfigError, match="got None"):
        HotsplitConfig(dyn_steps=None)


def test_a_home_folder_is_expanded_where_no_shell_did(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = HotsplitConfig.from_env({"HOTSPLIT_PLAN": "~/p.json", "HOTSPLIT_COUNTS": "~/h.json#book"})
    assert (Path("/home/ada/p.json"), "/home/ada/h.json#book") == (config.plan, config.counts)


def test_an_option_beats_the_environment_and_each_value_knows_its_origin():
    config = HotsplitConfig.from_options({"HOTSPLIT_HOT_GIB": "8", "HOTSPLIT_DYN_STEPS": "5"}, hot_gib=2, plan=None)
    assert (2.0, 5, None) == (config.hot_gib, config.dyn_steps, config.plan)
    assert ["option", "environment", "default"] == [config.origin(n) for n in ("hot_gib", "dyn_steps", "plan")]


def test_a_bad_variable_that_an_option_beats_does_not_matter():
    assert 2.0 == HotsplitConfig.from_options({"HOTSPLIT_HOT_GIB": "much"}, hot_gib=2).hot_gib


def test_an_option_given_as_an_empty_string_means_the_default():
    config = HotsplitConfig.from_options({"HOTSPLIT_DYN_STEPS": "5"}, dyn_steps="")
    assert (2000, "option") == (config.dyn_steps, config.origin("dyn_steps"))


def test_a_value_that_equals_the_default_still_has_its_origin():
    assert "environment" == from_variable("DYN_STEPS", "2000").origin("dyn_steps")


@pytest.mark.parametrize(
    ("slip", "nearest"),
    [
        ("HOTSPLIT_HOT_GB", "HOTSPLIT_HOT_GIB"),
        ("HOTSPLIT_DYN_STEP", "HOTSPLIT_DYN_STEPS"),
        ("HOTSPLIT_MARGIN", "HOTSPLIT_DYN_MARGIN"),
        ("HOTSPLIT_hot_gib", "HOTSPLIT_HOT_GIB"),
    ],
)
@pytest.mark.parametrize("value", ["1", ""])
def test_an_unknown_variable_is_refused_and_the_nearest_named(slip, nearest, value):
    with pytest.raises(ConfigError, match=f"^{slip}: got an unknown setting; did you mean {nearest}") as caught:
        HotsplitConfig.from_env({slip: value})
    assert 2 == caught.value.exit_code


@pytest.mark.parametrize("slip", ["HOTSPLIT_ZZZZ", "HOTSPLIT_"])
def test_a_variable_like_none_gets_no_suggestion(slip):
    with pytest.raises(ConfigError, match=f"^{slip}: got an unknown setting; docs/configuration.md lists them$"):
        HotsplitConfig.from_env({slip: "1"})


def test_an_unknown_option_is_refused_and_the_nearest_named():
    with pytest.raises(ConfigError, match=r"^option hotgib: .* did you mean hot_gib\?"):
        HotsplitConfig.from_options({}, hotgib=3)


def test_origins_are_no_setting():
    with pytest.raises(ConfigError, match="^option origins"):
        HotsplitConfig.from_options({}, origins={})


def test_variables_of_others_are_not_looked_at():
    assert HotsplitConfig.from_env({}) == HotsplitConfig.from_env(
        {"PATH": "/bin", "hotsplit_hot_gib": "x", "MY_HOTSPLIT_X": "1"}
    )


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"PATH": "/bin"}, False),
        ({"HOTSPLIT_ENABLE": "1"}, True),
        ({"HOTSPLIT_ENABLE": "0"}, False),
        ({"HOTSPLIT_HOT_GIB": "0"}, True),
        ({"HOTSPLIT_DYN_STEPS": "2000"}, True),
        ({"HOTSPLIT_ENABLE": "0", "HOTSPLIT_HOT_GIB": "8"}, False),
        ({"HOTSPLIT_ENABLE": "1", "HOTSPLIT_HOT_GIB": "8"}, True),
    ],
)
def test_hotsplit_is_on_when_any_setting_is_given_and_enable_is_not_0(environ, on):
    assert on is HotsplitConfig.from_env(environ).is_on


def test_an_option_turns_hotsplit_on_too():
    assert HotsplitConfig.from_options({}, hot_gib=1).is_on


def test_other_values_are_checked_even_when_hotsplit_is_off():
    with pytest.raises(ConfigError, match="HOTSPLIT_DYN_MARGIN"):
        HotsplitConfig.from_env({"HOTSPLIT_ENABLE": "0", "HOTSPLIT_DYN_MARGIN": "0.9"})


def test_gib_become_whole_bytes_rounded_down_and_never_overflow():
    assert 3 * 2**30 // 2 == from_variable("HOT_GIB", "1.5").hot_bytes
    assert 107374182 == from_variable("HOT_GIB", "0.1").hot_bytes
    assert from_variable("HOT_GIB", "1e308").hot_bytes > 10**308
    assert HotsplitConfig().hot_bytes is None
    assert 2 * 2**30 == HotsplitConfig().vram_reserve_bytes


def test_the_state_folder_is_the_users_cache_unless_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "hotsplit" == HotsplitConfig().state_path
    assert Path("here") == HotsplitConfig(state_dir="here").state_path


def test_bank_files_lie_in_the_state_folder_unless_told_otherwise():
    assert Path("here") == HotsplitConfig(state_dir="here").bank_path
    assert Path("there") == HotsplitConfig(state_dir="here", bank_dir="there").bank_path


def test_a_recipe_beats_the_default_and_yields_to_environment_and_option():
    recipe = {"hot_gib": 1, "dyn_steps": 7, "objective": "time", "dynamic": False}
    config = HotsplitConfig.from_options({"HOTSPLIT_DYN_STEPS": "8"}, recipe, hot_gib=2, objective="")
    assert (2, 8, "share", False) == (config.hot_gib, config.dyn_steps, config.objective, config.dynamic)
    origins = [config.origin(name) for name in ("hot_gib", "dyn_steps", "objective", "dynamic", "strict")]
    assert ["option", "environment", "option", "recipe", "default"] == origins
    assert config.is_on


@pytest.mark.parametrize(("recipe", "said"), [({"hot_gb": 1}, "recipe setting hot_gb"), ({"hot_gib": -1}, "hot_gib")])
def test_a_recipe_is_held_to_the_same_rules(recipe, said):
    with pytest.raises(ConfigError, match=said):
        HotsplitConfig.from_options({}, recipe)


def test_repr_and_rows_show_every_value_with_its_origin():
    config = HotsplitConfig.from_options({"HOTSPLIT_DYN_MARGIN": "2"}, dynamic=False)
    assert "dyn_margin=2.0 [environment]" in repr(config)
    assert "dynamic=False [option]" in repr(config)
    assert "kernel='exact' [default]" in repr(config)
    assert len(TABLE) == len(config.rows())
    assert ("HOTSPLIT_DYN_MARGIN", "2", "environment") in config.rows()
    assert ("HOTSPLIT_DYNAMIC", "0", "option") in config.rows()
    assert ("HOTSPLIT_HOT_GIB", "", "default") in config.rows()


def test_the_settings_are_frozen_and_survive_pickling():
    config = HotsplitConfig.from_options({"HOTSPLIT_HOT_GIB": "8"}, dynamic=False)
    with pytest.raises(FrozenInstanceError):
        config.hot_gib = 9.0
    copy = pickle.loads(pickle.dumps(config))
    assert (config, dict(config.origins)) == (copy, dict(copy.origins))


def test_the_memory_settings_say_what_they_are_on_a_cpu():
    meanings = {info.name: info.meaning for info in settings()}
    assert "on a CPU that is the RAM that is available, less the reserve, less the dense" in meanings["hot_gib"]
    assert "RAM with the transformers engine on a CPU" in meanings["vram_reserve_gib"]


def test_every_setting_has_a_meaning_of_one_line():
    assert [] == [info.name for info in settings() if len(info.meaning) < 20 or "\n" in info.meaning]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "hot_gib": st.floats(0, 1e300),
            "dynamic": st.booleans(),
            "dyn_steps": st.integers(1, 10**30),
            "dyn_max_swaps": st.integers(1, 10**6),
            "dyn_margin": st.floats(1, 1e300),
            "vram_reserve_gib": st.floats(0, 1e300),
            "numa_policy": st.sampled_from(["preferred", "bind", "off"]),
            "dyn_half_life": st.floats(0, 1e300, exclude_min=True),
            "strict": st.booleans(),
        },
    )
)
def test_what_is_written_as_rows_show_it_reads_back_the_same(options):
    config = HotsplitConfig.from_options({}, **options)
    environ = {variable: text for variable, text, origin in config.rows() if origin == "option"}
    assert config == HotsplitConfig.from_env(environ)
    assert all(as_written(getattr(config, name)) == environ[f"HOTSPLIT_{name.upper()}"] for name in options)


@given(
    st.sampled_from(sorted(TABLE)), st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
)
def test_any_text_is_either_taken_or_refused_with_one_clear_line(name, text):
    try:
        config = from_variable(name, text)
    except ConfigError as error:
        assert str(error).startswith(f"HOTSPLIT_{name}: got ")  # noqa: PT017 - either outcome is right
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert config.origin(name.lower()) == ("environment" if text.strip() else "default")
