"""Counts what `fxtune import` makes of the example configs of another tool.

    pip download --no-deps --no-binary :all: axolotl    # or curl: the source package on PyPI has all examples
    python scripts/study/import_reach.py axolotl 'axolotl-0.21.0/examples/**/*.y*ml'
    python scripts/study/import_reach.py llamafactory 'llamafactory-0.9.5/examples/train_*/*.yaml'

Each recipe of a config that translates whole is composed. None is trained: their models and rows are on the hub.
"""

from __future__ import annotations

import argparse
import glob
import os
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from fxtune.cli.import_config import TOOLS
from fxtune.config.compose import load
from fxtune.drafts import recipe
from fxtune.errors import ConfigError
from fxtune.migration.account import Fate, read

MARK = {"axolotl": "base_model", "llamafactory": "finetuning_type"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=MARK)
    parser.add_argument("configs", help="a glob")
    options = parser.parse_args()
    found = {Path(file).resolve() for file in glob.glob(options.configs, recursive=True)}
    configs = {file: yaml.safe_load(file.read_text()) for file in sorted(found)}
    configs = {file: values for file, values in configs.items() if isinstance(values, dict)}
    configs = {file: values for file, values in configs.items() if MARK[options.tool] in values}
    whole = composed = 0
    refused: Counter[str] = Counter()
    os.chdir(tempfile.mkdtemp(prefix="fxtune-import-"))
    for file, values in configs.items():
        account = read(TOOLS[options.tool], values, file=file)
        assert values.keys() <= account.entries.keys(), file
        reasons = [f"{entry.key}: {entry.text[:80]}" for entry in account.shown() if entry.fate is Fate.refused]
        refused.update(reasons)
        if reasons:
            continue
        whole += 1
        Path("draft.yaml").write_text(recipe.text([], account.recipe))
        try:
            load(["+recipe=./draft.yaml"])
            composed += 1
        except ConfigError as error:
            print(f"{file}: {error}")
    uses = sum(map(len, configs.values()))
    for reason, count in refused.most_common(20):
        print(f"{count:5}  {reason}")
    print(
        f"{len(configs)} configs, {whole} translate whole, {composed} compose; of {uses:,} uses of a key "
        f"{1 - refused.total() / uses:.1%} are translated or without effect"
    )


if __name__ == "__main__":
    main()
