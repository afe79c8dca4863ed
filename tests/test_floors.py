"""The house has floors, and imports point down only: what is below can be read, tested and changed without what is above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fxtune"

FLOORS = [
    {"__init__", "errors", "source", "console", "wandb_process", "fence", "redact", "sealed", "words"},
    {
        "halving",  # what an error says of memory, which all that is above may have to know
        "host",
    },
    # knows the machine, the disk, a library; nothing of training
    {
        "world",
        "shape",
        "library",
        "runfolder",
        "card",
        "hub",
        "inspection",
        "bounds",
        "wandb_link",
        "dynamo",
        "energy",
        "snapshot",
        "signals",
        "history",
        "kernels.*",
    },  # our own fused operators, each with its plain reference
    {"document"},  # what a recipe says
    {"schema"},  # and may say
    {
        "technique",
        "vetting",
        "probes",
        "machine",
        "memory",
        "recount",
        "backends",
        "adapted",
        "matmuls",
        "trials",
        "compiled",
        "adapter_files",
        "weights",
        "update_rule",
    },  # what an optimizer may be asked
    {"pace", "witness", "stored"},  # what checkpointing decides by, and what proves that it acted
    {"recomputation"},  # and what it may be asked
    # one capability each
    {
        "techniques.*",
        "data.*",
        "model",
        "optimizer",
        "schedule",
        "checkpoint",
        "metrics",
        "interval",
        "spikes",
        "display",
        "tracking",
    },
    # puts several together
    {"pipeline", "generation", "loss", "overrides", "suspects", "sameness"},
    {"config", "remedies"},  # what would help where memory ran out
    {
        "setting",
        "numbers",  # a config becomes machine, techniques, data and model: for training and for the commands
        "axes",
    },  # what can be varied in one
    {"point"},  # of a search on those axes
    {
        "comparison",  # with plain transformers
        "search",
        "tuned",
    },  # of the fastest point on those axes, and what was found as a recipe
    {"progress", "journal", "held_out"},  # what a run saves, what it says, what it is measured on
    {"train"},
    {"measure"},  # takes training's steps with a clock
    {"commands.*"},
    {"__main__"},
]

DATA = [
    "formats",
    "rows",
    "files",
    "readers",
    "remote",
    "sources",
    "conversation",
    "template",
    "literal",
    "chat",
    "table",
    "workers",
    "tokens",
    "packing",
    "mix",
    "batch",
    "segments",
    "stream",
    "plan",
    "preparation",
    "loader",
]
"""Inside data/: each may import those before it."""

KERNELS = [
    "gated_lora_triton",
    "gated_sums_triton",
    "quantized",
    "fp8_ends",
    "linear_cross_entropy",
    "lora_adapters",
    "lora_base",
    "lora_fp8",
    "fused_lora",
    "residual",
    "fused_forwards",
    "liger_forwards",
    "liger_timing",
]
"""Inside kernels/: what is put together from other kernels. Each may import all that are not named here, and those before it."""


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        if path.name != "__init__.py" or path.parent == package:
            found[name] = path
    return found


def imports(path: Path, names: set[str], package: str = "fxtune") -> set[str]:
    """The package's own modules that a file imports, anywhere in it, also for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in asked:
            if full == package or full.startswith(f"{package}."):
                name = full.removeprefix(package).removeprefix(".")
                while name and name not in names:
                    name = name.rpartition(".")[0]
                found.add(name or "__init__")
    return found


def floor(name: str) -> int:
    places = [
        number for number, modules in enumerate(FLOORS) if name in modules or f"{name.rpartition('.')[0]}.*" in modules
    ]
    assert len(places) == 1, f"fxtune/{name.replace('.', '/')}.py has no floor: give it one in tests/test_floors.py"
    return places[0]


def sideways_or_up(name: str, below: str) -> bool:
    if name.startswith("data.") and below.startswith("data."):
        return DATA.index(below.removeprefix("data.")) >= DATA.index(name.removeprefix("data."))
    if name.startswith("kernels.") and below.startswith("kernels.") and below.endswith("_triton"):
        return name.endswith("_triton")  # the Triton code of an operator, apart because triton is not everywhere
    if below.startswith("kernels.") and (place := name.removeprefix("kernels.")) in KERNELS:
        return below.removeprefix("kernels.") in KERNELS[KERNELS.index(place) :]
    return floor(below) >= floor(name)


ALL = modules(PACKAGE)


@pytest.mark.parametrize("name", ALL)
def test_imports_point_down(name):
    wrong = {below for below in imports(ALL[name], set(ALL)) if sideways_or_up(name, below)}
    told = ", ".join(f"{below} (floor {floor(below)})" for below in sorted(wrong))
    assert not wrong, f"{name} (floor {floor(name)}) imports {told}"


def test_the_table_names_only_what_is_there():
    listed = {name for level in FLOORS for name in level if not name.endswith("*")} | {f"data.{name}" for name in DATA}
    listed |= {f"kernels.{name}" for name in KERNELS}
    assert listed - set(ALL) == set()


def test_an_import_upwards_or_sideways_is_seen(tmp_path):
    file = tmp_path / "lora.py"
    file.write_text(
        "def f():\n    from fxtune import pipeline\n    import fxtune.techniques.rope\n"
        "    from fxtune.config import Config\n    from fxtune.errors import UserError\n"
        "    from fxtune import __version__\n"
    )
    found = imports(file, set(ALL))
    assert found == {"pipeline", "techniques.rope", "config", "errors", "__init__"}
    assert {name for name in found if sideways_or_up("techniques.lora", name)} == {
        "pipeline",
        "techniques.rope",
        "config",
    }
    assert sideways_or_up("data.sources", "data.loader")
    assert not sideways_or_up("data.loader", "data.sources")
