"""The command line: the Typer app, and the one place that turns an error into an exit code.

Exit codes: 0 done, 1 the run failed or a threshold was missed, 2 wrong usage or config or a file
that cannot be used, 3 not enough hardware, 130 interrupted by Ctrl-C or SIGTERM.
"""

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kllm import __version__, env
from kllm.cli.bench import bench_app
from kllm.cli.compare import compare
from kllm.cli.config import config_app
from kllm.cli.console import INTERRUPTED, err, interrupted, out, say, unread
from kllm.cli.doctor import doctor
from kllm.cli.generate import generate
from kllm.cli.models import models
from kllm.cli.recipes import recipes_app
from kllm.cli.report import report
from kllm.cli.tune import tune
from kllm.cli.tune_quality import tune_quality
from kllm.errors import CapacityError, ConfigError, DataError, KllmError, one_line


class _Root(TyperGroup):
    """The root command, which says that it was interrupted where a command does not."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; without this the library would end it in silence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interrupted("interrupted") from None
        except BrokenPipeError as error:
            if error.filename is None and _reader_is_gone():
                raise unread() from None
            raise


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Benchmark and tune deployments of large MoE language models.",
    epilog="Every option can also be set by a KLLM_* variable or a TOML file: `kllm config`.",
)
HOST_MEMORY = "out of memory on the host; use a smaller scale, batch or KV memory"
MEASURE, RESULTS, HERE = "Measure and tune", "Results", "Models and this machine"
app.command(rich_help_panel=MEASURE)(tune)
app.command("tune-quality", rich_help_panel=MEASURE)(tune_quality)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.command(rich_help_panel=RESULTS)(compare)
app.command(rich_help_panel=RESULTS)(report)
app.add_typer(recipes_app, name="recipes", rich_help_panel=RESULTS)
app.command(rich_help_panel=HERE)(generate)
app.command(rich_help_panel=HERE)(models)
app.command(rich_help_panel=HERE)(doctor)
app.add_typer(config_app, name="config", rich_help_panel=HERE)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__, highlight=False)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    """Root options; `--debug` is also taken after a command (see `main`)."""


def main() -> None:
    """Run the command line and exit."""
    args = sys.argv[1:]
    if "--debug" in args:
        args.remove("--debug")
        os.environ["KLLM_DEBUG"] = "1"
    try:
        with _torchrun(), _terminable():
            _run(args)
    except KllmError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        raise SystemExit(interrupted("interrupted").exit_code) from None
    except MemoryError:
        _fail(HOST_MEMORY, CapacityError.exit_code)
    except OSError as error:
        limits = error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
        _fail(_os_sentence(error), (CapacityError if limits else DataError).exit_code)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
            _fail(f"out of device memory: {error}".splitlines()[0], CapacityError.exit_code)
        if "can't allocate memory" in str(error):  # torch's allocator of host memory
            _fail(HOST_MEMORY, CapacityError.exit_code)
        _fail(f"internal error, please report it: {one_line(error)}", 1)


@contextmanager
def _torchrun() -> Iterator[None]:
    """Where torchrun started this process: all but the first become ranks and never get in."""
    if not {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys():
        yield
        return
    from kllm.engine import torchrun

    if not torchrun.is_first():
        torchrun.become_rank()
    try:
        yield
    finally:
        torchrun.finish()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM, with which schedulers end a job, do what Ctrl-C does."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else a shell ignores it
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless torch is being imported: its C++ would abort the process."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _run(args: list[str]) -> None:
    from kllm.cli.defaults import config_path, read_defaults

    for text in args:
        if text != text.encode(errors="ignore").decode():
            raise ConfigError(f"the argument {text!a} is not UTF-8; write or rename it so")
    command = typer.main.get_command(app)
    _name_variables(command, "KLLM")
    env.check()
    # `kllm config check` must be able to report a broken file, so it does not load one.
    path = None if args[:1] == ["config"] else config_path()
    defaults = read_defaults(path, command) if path else None
    command.main(args, prog_name="kllm", default_map=defaults)


def _name_variables(command: Any, prefix: str) -> None:
    """Give each option the variable of its name.

    They are left out of the help: their rule is stated once, by `config env`.
    """
    for param in command.params:
        param.show_envvar = False
        if (option := param.opts[0]).startswith("--") and param.name != "help":
            param.envvar = f"{prefix}_{option[2:]}".upper().replace("-", "_")
    for name, child in getattr(command, "commands", {}).items():
        _name_variables(child, f"{prefix}_{name}")


def _reader_is_gone() -> bool:
    """Whether nobody reads what this process prints any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _os_sentence(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "no more files or connections may be open; raise the limit with `ulimit -n`"
    if error.errno == errno.ENOSPC:
        return f"no space left on the disk while writing{where}; free some and run it again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not allowed to write or read{where}; choose another path with --output"
    return f"{error.strerror or error}{where}"


def _fail(sentence: str, code: int) -> None:
    if env.debug():
        traceback.print_exc()
    say(err, sentence, lead="error: ", style="red")
    raise SystemExit(code)
