"""The frame of the command line: quick help, one sentence and an exit code for each failure."""

import errno
import json
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kllm import __version__, env
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
        (OSError(errno.ENOSPC, "full", "out.json"), 2, "no space left on the disk while writing"),
        (PermissionError(errno.EACCES, "denied", "out.json"), 2, "not allowed to write or read"),
        (OSError(errno.EMFILE, "too many"), 3, "raise the limit with `ulimit -n`"),
        (RuntimeError("alloc_cpu.cpp: can't allocate memory:\nframes"), 3, "out of memory on"),
        (RuntimeError("odd\nframe #1"), 1, "internal error, please report it: RuntimeError: odd"),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_the_command(number: signal.Signals) -> None:
    """A Python exception in the import of its C++ part would abort the process."""
    code = (
        "import importlib.machinery, signal, sys, types\n"
        "from kllm.cli import app\n"
        "torch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "torch.__spec__ = importlib.machinery.ModuleSpec('torch', None)\n"
        "torch.__spec__._initializing = True\n"
        f"app._run = lambda args: signal.raise_signal({int(number)})\n"
        "sys.argv = ['kllm', 'doctor']\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "show",
    ["app.out.print('results')", "typer.echo('results')"],
    ids=["table", "text"],
)
def test_a_reader_that_has_gone_is_no_regression(show: str) -> None:
    """Exit code 1 would be one to a script that compares and reads the first lines only."""
    code = (
        "import sys, typer\n"
        "from kllm.cli import app\n"
        f"app.app.command('x')(lambda: {show})\n"
        "sys.stdin.read()\n"
        "sys.argv = ['kllm', 'x']\n"
        "app.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    process.stdout.close()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (2, b"")


def test_the_variable_of_an_option_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLLM_MODELS_JSON", "1")  # the parameter is as_json
    monkeypatch.setattr(sys, "argv", ["kllm", "models", "llama-3-8b"])
    shown: list[str] = []
    monkeypatch.setattr(typer, "echo", shown.append)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert json.loads(shown[0])["models"][0]["name"] == "llama-3-8b"


@pytest.mark.parametrize(
    ("name", "value"),
    [("KLLM_STEP_TIMEOUT_S", "soon"), ("KLLM_HOME", "~no-such-user/x")],
)
def test_a_variable_is_checked_whatever_runs(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["kllm", "bench", "list"])
    env.read.cache_clear()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    env.read.cache_clear()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {name}='{value}' cannot be read: ")


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
