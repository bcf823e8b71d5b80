"""The frame of the command line: quick help, one sentence and an exit code for each failure."""

import errno
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kllm import __version__
from kllm.cli import app as cli
from kllm.errors import CapacityError, ConfigError, DataError, KllmError


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, typer\n"
        "from kllm.cli.app import app\n"
        "typer.main.get_command(app)\n"
        "heavy = {'torch', 'numpy', 'pandas', 'optuna', 'scipy', 'matplotlib', 'transformers'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported for help: {done.stderr}"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "kllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KllmError("it broke; do this"), 1, "error: it broke; do this"),
        (ConfigError("no such thing"), 2, "error: no such thing"),
        (DataError("unreadable"), 2, "error: unreadable"),
        (CapacityError("too large"), 3, "error: too large"),
        (MemoryError(), 3, "out of memory on the host"),
        (OSError(errno.ENOSPC, "full", "out.json"), 1, "no space left on the disk while writing"),
        (PermissionError(errno.EACCES, "denied", "out.json"), 1, "not allowed to write or read"),
        (ZeroDivisionError("division by zero"), 1, "internal error, please report it: ZeroDiv"),
    ],
)
def test_each_error_is_one_sentence_and_a_code(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(sys, "argv", ["kllm", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    assert stopped.value.code == code
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_sigterm_ends_a_command_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "_run", lambda args: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_every_command_explains_itself_and_its_options() -> None:
    def walk(command: object, path: str) -> None:
        for name, child in getattr(command, "commands", {}).items():
            here = f"{path} {name}"
            assert child.help, f"{here} has no help"
            for param in child.params:
                if param.param_type_name == "option" and param.name != "help":
                    assert param.help, f"{here} {param.name} has no help"
            walk(child, here)

    walk(typer.main.get_command(cli.app), "kllm")


def test_help_is_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is longer than its column would be cut off."""
    monkeypatch.setenv("COLUMNS", "80")

    def walk(command: object, path: tuple[str, ...]) -> None:
        shown = CliRunner().invoke(cli.app, [*path, "--help"])
        assert shown.exit_code == 0
        assert "…" not in shown.stdout, shown.stdout
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*path, name))

    walk(typer.main.get_command(cli.app), ())
