"""``outlast plan`` as it is called; its sentences are in tests/transcripts/parallelism.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast import cli
from outlast.errors import ExitCode

GPT = ("--model", "gpt3-345m", "--global-batch", "64")


def plan(*words: str) -> int:
    return cli.main(["plan", *words])


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert plan(*words, "--json") == ExitCode.OK
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row_for_each_loss(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *GPT, "--gpus", "4", "--tp", "2", "--pp", "2", "--dp", "1", "--memory", "32GiB")
    assert [(row["lost"], row["devices"], row["possible"]) for row in found] == [
        *((0, 4, True), (1, 3, True), (2, 2, True), (3, 1, True))
    ]
    assert found[0]["best"]["layout"] == {"tp": 2, "pp": 2, "dp": 1, "cp": 1, "ep": 1, "virtual": 1}


def test_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*GPT, "--gpus", "8", "--tp", "2", "--pp", "2", "--ranking", "2") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tp 2, pp 1, dp 3")
    assert len(lines) > 5
    found = rows(capsys, *GPT, "--gpus", "8", "--ranking", "0")
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)


def test_an_impossible_loss_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "8", "--tp", "2", "--pp", "2", "--checkpoint", "megatron", "--must-survive", "5")
    assert plan(*GPT, *words) == ExitCode.USAGE
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "--dist-ckpt-optim-fully-reshardable" in text


def test_unequal_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *GPT, "--nodes", "2x8@80GiB,1x6@80,1x4@40GiB*0.5", "--lost", "1")
    assert [row["devices"] for row in found] == [26, 18]


GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
TOML = "[model]\nlayers = 4\nhidden = 64\nheads = 4\nsequence = 128\nvocabulary = 256\n"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("m.toml", TOML, []),
        ("m.toml", TOML.replace("[model]\n", ""), []),
        ("config.json", json.dumps(GPT2), []),
        ("m.toml", "layers = 4\nhidden = 64\nhead = 4\n", ["head:", "heads:", "sequence:", "vocabulary:"]),
        ("config.json", json.dumps({**GPT2, "n_layer": None}), ["num_hidden_layers or n_layer:"]),
        ("m.json", "{", ["m.json"]),
        ("m.json", "[1]", ["m.json", "list"]),
        ("m.toml", "model = 3", ["m.toml", "model:"]),
        ("m.json", "[" * 100_000, ["m.json"]),
        ("m.toml", None, ["m.toml", "No such file or directory"]),
    ],
    ids=[
        *("table", "flat table", "Hugging Face", "names", "missing", "no JSON", "a list", "no table"),
        *("too deep", "no file"),
    ],
)
def test_a_model_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, named: list[str]
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    words = ("--model", str(file), "--global-batch", "8", "--gpus", "4", "--sequence", "64")
    assert plan(*words) == (ExitCode.USAGE if named else ExitCode.OK)
    error = capsys.readouterr().err
    for word in named:
        assert word in error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "gpt5", "--global-batch", "8", "--gpus", "8"), "gpt3-345m"),
        ((*GPT, "--gpus", "0"), "--gpus, --gpus-per-node"),
        ((*GPT, "--nodes", "8"), "--nodes 8"),
        ((*GPT, "--gpus", "8", "--tp", "3"), "16 % tp 3"),
        ((*GPT, "--gpus", "8", "--dp", "9"), "9"),
        ((*GPT, "--gpus", "8", "--memory", "0.1"), "gpt3-345m"),
        ((*GPT, "--gpus", "7", "--every-gpu", "--even"), "7 devices"),
        ((*GPT, "--gpus", "8", "--tp", "0"), "1"),
        ((*GPT, "--gpus", "8", "--micro-batch", "0"), "0"),
        ((*GPT, "--gpus", "999999999"), "124999999"),
        ((*GPT, "--nodes", "131072x1,1x1"), "131073"),
        ((*GPT, "--nodes", "0x8"), ""),
        ((*GPT, "--nodes", "1x8*0"), "0"),
        ((*GPT, "--gpus", "8", "--must-survive", "9"), "--must-survive 9"),
        ((*GPT, "--gpus", "8", "--must-survive", "8"), "8"),
    ],
)
def test_wrong_options(words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == ExitCode.USAGE
    assert named in capsys.readouterr().err


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
