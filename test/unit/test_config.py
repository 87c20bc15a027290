"""Options: ranges, the environment channel, and that flags and defaults come from one place."""

import argparse
import dataclasses
import re

import pytest

from granikv_sglang.config import ENV_VAR, GROUPS, GraniKVConfig, add_cli_args, from_args
from granikv_sglang.core import GraniKVError


def parse(*argv: str) -> GraniKVConfig:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return from_args(parser.parse_args(argv))


def test_command_line_defaults_are_the_dataclass_defaults():
    assert parse() == GraniKVConfig()


def test_every_option_has_a_flag_that_sets_it():
    values = {"int": ("77", 77), "str": ("uniform", "uniform"), "bool": (None, True)}
    for field in dataclasses.fields(GraniKVConfig):
        choices = field.metadata.get("choices")
        text, expected = (choices[-1], choices[-1]) if choices else values[field.type]
        argv = [field.metadata["flag"], *([text] if text else [])]
        assert getattr(parse(*argv), field.name) == expected


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--granikv-min-tokens", "15"], "--granikv-min-tokens"),
        (["--granikv-min-tokens", "many"], "--granikv-min-tokens"),
        (["--granikv-min-sharers", "1"], "--granikv-min-sharers"),
        (["--granikv-regime", "fast"], "--granikv-regime"),
        (["--granikv-prefill", "fast"], "--granikv-prefill"),
        (["--granikv-sharing", "all"], "--granikv-sharing"),
        (["--granikv-hot", "warm"], "--granikv-hot"),
    ],
)
def test_bad_values_are_refused_in_one_line_that_names_the_flag(argv, flag):
    with pytest.raises(GraniKVError) as caught:
        parse(*argv)
    assert flag in str(caught.value)
    assert argv[1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_groups_the_flags_each_with_effect_and_default():
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    text = " ".join(parser.format_help().split())
    places = [text.index(f"{heading}: --granikv-") for heading in GROUPS]
    assert places == sorted(places)
    for action in parser._actions:
        assert action.help is not None and re.search(r"\. Default: \S+\.$", action.help), action.option_strings


def test_options_survive_the_environment():
    env: dict[str, str] = {}
    config = GraniKVConfig(min_tokens=100, regime="cascade", audit=True)
    config.to_env(env)
    assert GraniKVConfig.from_env(env) == config
    assert GraniKVConfig.from_env({}) == GraniKVConfig()


@pytest.mark.parametrize("text", ["{", '{"nonsense": 1}', "[1]"])
def test_an_unreadable_environment_names_the_variable(text):
    with pytest.raises(GraniKVError, match=ENV_VAR):
        GraniKVConfig.from_env({ENV_VAR: text})
