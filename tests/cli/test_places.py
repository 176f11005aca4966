"""Where commands may write: never over what they read, over what is no file, or over each other."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from hotsplit.data import text_path


@pytest.fixture
def commands(counts, write_counts, tiny_moe, tmp_path):
    """Commands by name, without their outputs, with every input a copy of its own."""
    model = shutil.copytree(tiny_moe, tmp_path / "model")
    live = write_counts(tmp_path / "live.json", seed=1)
    reference = shutil.copy(counts, tmp_path / "reference.json")
    text = shutil.copy(text_path("c"), tmp_path / "text.txt")
    more = shutil.copy(text_path("html"), tmp_path / "more.txt")
    return {
        "rerank": ("rerank", live, reference),
        "plan": ("plan", model, "--counts", reference, "--test", live, "--hot-gib", 0.002),
        "fraction": ("plan", "--counts", reference, "--test", live, "--hot-fraction", 0.5),
        "profile": ("profile", model, "--data", text, more, "--counts", reference, "--hot-gib", 0.002),
    }


INPUTS = [
    ("rerank", "-o", "live.json"),
    ("rerank", "-o", "reference.json"),
    ("plan", "-o", "live.json"),
    ("plan", "-o", "reference.json"),
    ("plan", "-o", "model/config.json"),
    ("plan", "-o", "model/model.safetensors"),
    ("fraction", "-o", "live.json"),
    ("fraction", "-o", "reference.json"),
    ("profile", "-o", "text.txt"),
    ("profile", "-o", "more.txt"),
    ("profile", "-o", "reference.json"),
    ("profile", "-o", "model/config.json"),
    ("profile", "-o", "model/tokenizer.json"),
    ("profile", "--trace", "text.txt"),
    ("profile", "--trace", "model/model.safetensors"),
]


@pytest.mark.transformers
@pytest.mark.parametrize(("name", "option", "target"), INPUTS, ids=str)
def test_an_output_that_is_an_input_is_refused_and_the_input_stays(cli, commands, tmp_path, name, option, target):
    before, output = (tmp_path / target).read_bytes(), tmp_path / target
    others = ("-o", tmp_path / "out.json") if option == "--trace" else ()
    line = cli(*commands[name], option, output, *others).refusal(2)
    assert f"{'--trace' if option == '--trace' else '--output'}: got {output}, which is read: " in line
    assert before == output.read_bytes()


@pytest.mark.parametrize("spelling", ["dotted", "link", "hard link"])
def test_an_input_by_another_name_is_still_an_input(cli, commands, tmp_path, spelling):
    output, target = tmp_path / "alias", tmp_path / "live.json"
    if spelling == "dotted":
        output = tmp_path / "model" / ".." / target.name
    else:
        output.symlink_to(target) if spelling == "link" else output.hardlink_to(target)
    assert f"--output: got {output}, which is read: {target}" in cli(*commands["rerank"], "-o", output).refusal(2)
    assert target.read_text().startswith('{"created"')


def test_a_set_of_a_file_is_that_file(cli, commands, tmp_path):
    path = tmp_path / "reference.json"
    line = cli("rerank", tmp_path / "live.json", f"{path}#set", "-o", path).refusal(2)
    assert f"--output: got {path}, which is read: {path}" in line


def test_counts_named_by_a_variable_are_an_input_too(cli, commands, tmp_path):
    path = str(tmp_path / "reference.json")
    line = cli("plan", "--hot-fraction", 0.5, "-o", path, env={"HOTSPLIT_COUNTS": path}).refusal(2)
    assert f"--output: got {path}, which is read: {path}" in line


def test_an_earlier_plan_in_the_models_folder_may_be_written_over(cli, commands, tmp_path):
    output = tmp_path / "model" / "plan.json"
    output.write_text("an earlier plan")
    assert 0 == cli(*commands["plan"], "-o", output).code
    assert output.read_text().startswith('{"format":"hotsplit-plan"')


@pytest.mark.transformers
def test_a_histogram_and_a_trace_are_two_files_whatever_they_are_called(cli, commands, tmp_path):
    (tmp_path / "alias").symlink_to("out")
    line = cli(*commands["profile"], "-o", tmp_path / "out", "--trace", tmp_path / "alias").refusal(2)
    assert f"--trace: got {tmp_path / 'alias'}, as --output; wanted another file" in line


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["rerank", "plan", "fraction", "profile"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_an_output_that_is_no_file_is_refused_before_the_work(cli, commands, tmp_path, name, kind):
    odd = {"pipe": tmp_path / "pipe", "device": "/dev/null", "folder": tmp_path}[kind]
    os.mkfifo(tmp_path / "pipe")
    reason = {
        "pipe": "a named pipe, no regular file",
        "device": "a device, no regular file",
        "folder": "is a directory",
    }
    assert f"cannot write {odd}: got {reason[kind]}; choose another" in cli(*commands[name], "-o", odd).refusal()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_stays_a_link_and_its_target_is_written(cli, commands, tmp_path):
    (tmp_path / "link.json").symlink_to("merged.json")
    assert 0 == cli(*commands["rerank"], "-o", tmp_path / "link.json").code
    assert "merged.json" == os.readlink(tmp_path / "link.json")
    assert (tmp_path / "merged.json").read_text().startswith('{"created"')


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_show_reads_no_device_and_no_pipe(cli, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in cli("show", tmp_path / name).refusal()


def test_a_folder_that_will_be_made_is_said(cli, commands, tmp_path):
    output = tmp_path / "new" / "merged.json"
    assert f"{output.parent} is not there and will be made\n" in cli(*commands["rerank"], "-o", output).err
    assert output.is_file()
    assert "will be made" not in cli(*commands["rerank"], "-o", output).err
