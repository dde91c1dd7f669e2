"""``outlast plan`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import ExitCode

GPT = ("--model", "gpt3-345m", "--global-batch", "64")


def plan(*words: str) -> int:
    return cli.main(["plan", *words])


def test_the_table_and_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*GPT, "--gpus", "16", "--tp", "2", "--pp", "2", "--lost", "1") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "nodes lost"
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "16"], ["1", "8"]]
    assert "tp 2, pp 2, dp 4" in lines[1]
    assert " yes " in lines[2]
    assert lines[4].startswith("0: today's layout, 16 of 16 devices")
    assert lines[5].startswith("1: keeps tp 2 and pp 2: only dp 4 to 2")
    assert lines[-2].startswith("checkpoint: yes, if tensors are DTensors")
    assert lines[-1] == "memory was not checked: --memory is not given"


def test_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "4", "--tp", "2", "--pp", "2", "--dp", "1", "--memory", "32GiB", "--json")
    assert plan(*GPT, *words) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["lost"], row["devices"], row["possible"]) for row in rows] == [
        (0, 4, True),
        (1, 3, True),
        (2, 2, True),
        (3, 1, True),
    ]
    assert rows[0]["best"]["layout"] == {"tp": 2, "pp": 2, "dp": 1, "cp": 1, "ep": 1, "virtual": 1}


def test_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*GPT, "--gpus", "8", "--tp", "2", "--pp", "2", "--ranking", "2") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tp 2, pp 1, dp 3")
    assert len(lines) > 5
    assert plan(*GPT, "--gpus", "8", "--ranking", "0", "--json") == ExitCode.OK
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)


def test_an_impossible_loss_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "8", "--tp", "2", "--pp", "2", "--checkpoint", "megatron", "--must-survive", "5")
    assert plan(*GPT, *words) == ExitCode.USAGE
    captured = capsys.readouterr()
    said = "megatron allows dp to change, not tp, pp; save with --dist-ckpt-optim-fully-reshardable"
    assert f"the checkpoint cannot: {said}" in captured.out
    assert captured.err == (
        "outlast plan: the job would end with the loss of 5: its megatron checkpoint cannot be loaded:"
        f" {said}; nothing was started\n"
    )


def test_unequal_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "2x8@80GiB,1x6@80,1x4@40GiB*0.5", "--lost", "1", "--json")
    assert plan(*GPT, *words) == ExitCode.OK
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["devices"] for row in rows] == [26, 18]


def test_a_model_of_a_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.toml"
    file.write_text("[model]\nlayers = 4\nhidden = 64\nheads = 4\nsequence = 128\nvocabulary = 256\n")
    words = ("--global-batch", "8", "--gpus", "4", "--sequence", "64")
    assert plan("--model", str(file), *words) == ExitCode.OK
    file.write_text("layers = 4\nhidden = 64\nhead = 4\n")
    assert plan("--model", str(file), *words) == ExitCode.USAGE
    error = capsys.readouterr().err
    for name in ("head: unknown", "heads: missing", "sequence: missing", "vocabulary: missing"):
        assert name in error


def test_a_model_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    config = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    file.write_text(json.dumps(config))
    words = ("--global-batch", "8", "--gpus", "4")
    assert plan("--model", str(file), *words) == ExitCode.OK
    del config["n_layer"]
    file.write_text(json.dumps(config))
    assert plan("--model", str(file), *words) == ExitCode.USAGE
    assert "num_hidden_layers or n_layer: missing; transformer layers." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name", "word"),
    [
        ("{", "m.json", "cannot be parsed"),
        ("[1]", "m.json", "an object is expected, a list was found"),
        ("model = 3", "m.toml", "model: a table is expected"),
        ("[" * 100_000, "m.json", "cannot be parsed"),
        (None, "m.toml", "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_describes_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, name: str, word: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert plan("--model", str(tmp_path / name), "--global-batch", "8", "--gpus", "4") == ExitCode.USAGE
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt5", "--global-batch", "8", "--gpus", "8"), "presets: gpt3-345m"),
        ((*GPT, "--gpus", "0"), "--gpus, --gpus-per-node: at least 1"),
        ((*GPT, "--nodes", "8"), "--nodes 8: COUNTxDEVICES"),
        ((*GPT, "--gpus", "8", "--tp", "3"), "attention heads 16 % tp 3 is 1"),
        ((*GPT, "--gpus", "8", "--dp", "9"), "9 ranks in groups of 1"),
        (
            (*GPT, "--gpus", "8", "--memory", "0.1"),
            "no layout for gpt3-345m fits into the memory of 8 devices",
        ),
        ((*GPT, "--gpus", "7", "--every-gpu", "--even"), "7 devices (a prime number)"),
        ((*GPT, "--gpus", "8", "--tp", "0"), "every degree is at least 1"),
        ((*GPT, "--gpus", "8", "--micro-batch", "0"), "micro-batches of 0"),
        ((*GPT, "--gpus", "999999999"), "124999999 nodes: at most 131072"),
        ((*GPT, "--nodes", "131072x1,1x1"), "131073 nodes: at most 131072"),
        ((*GPT, "--nodes", "0x8"), "no device is left"),
        ((*GPT, "--nodes", "1x8*0"), "a speed above 0"),
        ((*GPT, "--gpus", "8", "--must-survive", "9"), "--must-survive 9: the job has 8 devices"),
        ((*GPT, "--gpus", "8", "--must-survive", "8"), "the loss of 8: no device is left"),
    ],
)
def test_wrong_options(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--fixed", "dp"),
        ("--memory", "x"),
        ("--flops", "0"),
        ("--lost", "1,-1"),
        ("--checkpoint", "zip"),
        ("--nodes", "1x8"),
    ],
)
def test_options_that_cannot_be_parsed(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*GPT, "--gpus", "8", *words)
    assert caught.value.code == ExitCode.USAGE
