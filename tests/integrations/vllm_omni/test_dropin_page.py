"""docs/dropin.md says what is so: its table of names is the table, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

from omnikv.integrations.vllm_omni.aliases import TABLE

PAGE = (Path(__file__).parents[3] / "docs" / "dropin.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_lists_exactly_the_names_that_are_offered():
    listed = dict(re.findall(r"^\| `(vllm[\w.]+)` \| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert listed == {alias: ours.rpartition(".")[2] for alias, ours in TABLE.items()}


def test_the_example_of_installing_runs(run_program):
    run_program(f"{EXAMPLES[0]}\nassert not is_installed() and engine_modules() == {{}}\n")


def test_the_example_of_lending_a_group_runs(run_program):
    run_program(
        "import types\ninstall()\nmy_group = types.SimpleNamespace(world_size=2, rank_in_group=1)\n"
        f"{EXAMPLES[1]}\nassert parallel_state.get_tensor_model_parallel_rank() == 1\n"
    )
