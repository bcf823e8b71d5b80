"""Imports point one way; packaging declares every folder."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = {"cli", "tuners", "recipes", "results"}  # folders beside kllm/, imported as kllm.<name>
LAYERS = """
    errors | env registry | config results | core hardware | kernels parallel | quant | cache
    | attention | layers | models | sampling | scheduler | engine | recipes | bench | tuners | cli
""".split("|")  # lowest first; a package imports its left neighbours, never the same column
RANK = {name: i for i, column in enumerate(LAYERS) for name in column.split()}
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", ["kllm", *sorted(MAPPED)])
def test_imports_point_down(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        here = folder if folder in MAPPED else parts[0]
        if here in ("__init__", "__main__"):
            continue  # the public face may name anything
        theirs = {n.split(".")[1] for n in imported_names(path) if n.startswith("kllm.")}
        public = {"__version__"}  # the package's own facts
        bad = {t for t in theirs - {here} - public if RANK.get(t, 99) >= RANK[here]}
        assert not bad, f"{path} imports {sorted(bad)} from above"


def test_every_package_folder_is_declared() -> None:
    on_disk = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in SETUPTOOLS["package-dir"].items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(on_disk) == sorted(SETUPTOOLS["packages"])


def test_engine_folder_does_not_shadow_a_mapped_package() -> None:
    engine = ROOT / "kllm"
    assert not [n for n in MAPPED if (engine / n).exists() or (engine / f"{n}.py").exists()]
