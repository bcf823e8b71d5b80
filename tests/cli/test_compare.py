"""`kllm compare` and `kllm report` as a script sees them: codes and streams."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kllm.cli.compare import compare
from kllm.cli.report import report
from kllm.errors import ConfigError
from kllm.results import store
from tests.results import samples

app = typer.Typer()
app.command()(compare)
app.command()(report)
RUNNER = CliRunner()


def write(folder: Path, factor: float, seed: int) -> str:
    rng = np.random.default_rng(seed)
    values = factor * np.exp(rng.normal(0, 0.01, 12))
    result = samples.bench(metrics={"tpot_ms": samples.times(values.tolist())})
    return str(store.save(result, folder / f"{factor}-{seed}.json"))


@pytest.mark.parametrize(
    ("factor", "options", "code"),
    [(1.0, [], 0), (1.2, [], 1), (0.8, [], 0), (1.2, ["--fail-on", "worse:40%"], 0)],
)
def test_exit_code_is_one_only_on_a_regression(
    tmp_path: Path, factor: float, options: list[str], code: int
) -> None:
    args = ["compare", write(tmp_path, 1.0, 1), write(tmp_path, factor, 2), *options]
    assert RUNNER.invoke(app, args).exit_code == code


def test_json_is_one_document_on_stdout(tmp_path: Path) -> None:
    args = ["compare", write(tmp_path, 1.0, 1), write(tmp_path, 1.2, 2), "--json"]
    document = json.loads(RUNNER.invoke(app, args).stdout)
    assert document["rows"][0]["judgement"]["verdict"] == "worse"


def test_two_output_forms_are_refused(tmp_path: Path) -> None:
    args = ["compare", "a", "b", "--json", "--markdown"]
    assert isinstance(RUNNER.invoke(app, args).exception, ConfigError)


def test_html_is_written_and_stdout_keeps_the_table(tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    args = ["compare", write(tmp_path, 1.0, 1), write(tmp_path, 1.0, 2), "--html", str(page)]
    result = RUNNER.invoke(app, args)
    assert "tpot_ms" in result.stdout
    assert "c.html" not in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_report_prints_markdown_by_default(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["report", write(tmp_path, 1.0, 1)])
    assert result.stdout.startswith("# kLLM report: latency")


def test_report_writes_html_and_keeps_stdout_empty(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    result = RUNNER.invoke(app, ["report", write(tmp_path, 1.0, 1), "--html", str(page)])
    assert result.stdout == ""
    assert "<svg" in page.read_text()
