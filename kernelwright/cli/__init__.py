"""The command line, `kernelwright` and `kw`. One module a topic; this one turns exceptions into lines and exit codes.

Exit codes: 0 fine; 1 the answer is no (`check`, `tasks validate`); 2 the command or the machine is at fault, with one
line on stderr; 130 stopped by Ctrl-C. Heavy modules (torch, transformers) are imported by the commands that need them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kernelwright.cli import candidates, catalogue, machine, training
from kernelwright.errors import KernelwrightError

# the base class of click's errors, which typer brings along under a name that differs between its versions
_ClickError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="kernelwright",
    help="Multi-turn reinforcement learning that teaches language models to write fast kernels.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kernelwright {version('kernelwright')}")
        raise typer.Exit


@app.callback()
def common(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Multi-turn reinforcement learning that teaches language models to write fast kernels."""
    # `main` takes --debug out of the arguments, so that it may stand anywhere; --version has been dealt with
    del debug, version


app.command("train")(training.train)
app.command("evaluate")(training.evaluate)
app.command("check")(candidates.check)
app.command("refine")(training.refine)
app.add_typer(catalogue.tasks, name="tasks")
app.command("recipes")(catalogue.recipes)
app.command("report")(training.report)
app.command("doctor")(machine.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    # torch's threads wait for each other spinning, by default for so long that on a machine with anything else to do
    # they stand in the way of each other (measured: an update of 4 s takes 39 s). Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        code = app(words, prog_name="kernelwright", standalone_mode=False)
    except BrokenPipeError:
        # the reader of a pipe (`| head`) has left; the interpreter must not complain about it on the way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print("kernelwright: stopped", file=sys.stderr)
        code = 130
    except (_ClickError, KernelwrightError, OSError) as error:
        if debug:
            raise
        print("kernelwright:", " ".join(_line(error).split()), file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _line(error: BaseException) -> str:
    """An error in one line; a usage error names the nearest option where there is one."""
    if isinstance(error, KernelwrightError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename}" if error.filename else f"{error.strerror or error}"
    near = getattr(error, "possibilities", None)
    if near:
        return f"unknown option '{getattr(error, 'option_name', '')}'; did you mean '{near[0]}'?"
    text = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    return f"{text.rstrip('.')} (see '{context.command_path} --help')" if context else text
