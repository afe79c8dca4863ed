"""What `run.deterministic=auto` decides: the same bits each time where they cost next to nothing.

It chooses kernels only. Clocks, free memory and other cards or versions are as with `false`.
"""

from __future__ import annotations

from dataclasses import replace

from fxtune.facts.run import Facts
from fxtune.techniques.estimate.determinism import cost
from fxtune.techniques.pipeline import Pipeline

MOST = 0.02
"""The largest share of a step that `auto` gives for the same bits."""


def decide(asked: Pipeline, usual: Pipeline, facts: Facts) -> tuple[Pipeline | None, list[str]]:
    """The techniques with deterministic kernels, or None; and lines on what was decided. Without lines on a CPU, which
    has no other kernels. `asked`: before any `auto` is decided; `usual`: for the fastest kernels."""
    if facts.device != "cuda":
        return None, []
    fixed = replace(facts, techniques=asked, deterministic=True)
    techniques, notes = asked.possible(fixed)[0].decided(fixed)
    same = [name for name, _ in techniques.enabled()] == [name for name, _ in usual.enabled()]
    why = (techniques if same else usual).nondeterministic_option(facts)
    share = cost(replace(facts, techniques=usual))
    if why is None and share is None:
        why = f"what it costs is not measured for this attention and row on {facts.device_name}"
    elif why is None and share is not None and share > MOST:
        why = f"it costs about {share:.1%} of a step here"
    if why is not None:
        return None, [line(why)]
    return techniques, [
        *notes,
        f"deterministic: on, the same bits each time on this card, for some {share:.1%} of a step by forecast",
    ]


def line(why: str) -> str:
    """The line on deterministic kernels that are off."""
    return (
        f"deterministic: off, because {why}; two runs, or a resumed one, may differ in their last digits "
        "(run.deterministic=true asks for the same bits)"
    )
