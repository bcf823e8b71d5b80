"""`kllm generate`: the known answer on stdout, one sentence when there can be none."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kllm.cli.app import main
from kllm.cli.generate import generate
from kllm.engine.engine import Engine, StepOutput
from kllm.errors import ConfigError, DependencyError
from kllm.models.gguf import packaged_smollm2

QUESTION = "What is the capital of France?"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm", "generate", "--device", "cpu", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def real_model() -> None:
    try:
        packaged_smollm2()
    except DependencyError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("real_model")
def test_the_known_answer_is_all_of_stdout() -> None:
    ran = run("--model", "smollm2-135m", "--temperature", "0", QUESTION)
    assert ran.stdout == "The capital of France is Paris.\n"
    assert ran.returncode == 0


@pytest.mark.usefixtures("real_model")
def test_json_is_one_document() -> None:
    ran = run("--json", "--temperature", "0", "--stop", " is", QUESTION)
    document = json.loads(ran.stdout)
    assert document["text"] == "The capital of France"
    assert document["finish_reason"] == "stop"
    assert document["prompt_tokens"] == 16
    assert document["output_tokens"] == len(document["output_ids"])


@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_an_interrupted_answer_is_kept_and_said(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, left = Engine.step, iter(range(3))

    def until_interrupted(engine: Engine) -> StepOutput:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", until_interrupted)
    flags = ["--json"] if as_json else []
    args = ["kllm", "generate", *flags, "--device", "cpu", "--temperature", "0", QUESTION]
    monkeypatch.setattr(sys, "argv", args)
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 130
    assert err == "interrupted after 3 of 256 tokens\n"
    if as_json:
        assert json.loads(out)["finish_reason"] == "abort"
        assert json.loads(out)["text"] == "The capital of"
    else:
        assert out == "The capital of\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "llama-3-8b", "--load", "random", "hi"], "has no tokenizer"),
        (["--model", "llama-3-8b", "--load", "weights", "hi"], "has no weights on this machine"),
        (["--model", "lama", "hi"], "unknown model 'lama'"),
        (["--top-p", "2", "hi"], r"top_p must be in \(0, 1\], got 2.0"),
        (["--load", "some", "hi"], "unknown load 'some'"),
        (["--dtype", "int8", "hi"], "unknown dtype 'int8'"),
    ],
)
def test_what_cannot_be_is_a_usage_error(args: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(generate)
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["--device", "cpu", *args], catch_exceptions=False)


def test_a_usage_error_is_one_sentence_and_exit_code_2() -> None:
    ran = run("--model", "lama", "hi")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: unknown model 'lama'")
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""
