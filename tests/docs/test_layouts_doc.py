"""The page on layouts: its programs run, and every layout in its table is one."""

import re
from pathlib import Path

import torch

from omnikv import Layout

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def test_the_program_hands_over_what_it_says():
    names = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], names)
    sent = names["pool"][0][[5, 2]].flatten(0, 1)[:24].bfloat16()
    keys = names["there"][3].view(3, 2, 24 * 64)[:, 0].view(3, 64, 24).permute(2, 0, 1)
    assert torch.equal(keys, sent)


def test_a_model_is_stated_once_and_its_route_carries_a_request():
    _, program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})


def test_every_layout_of_the_table_is_one_of_the_shape_beside_it():
    rows = re.findall(r"^\| `(Layout\..*?)` \| (.*?) \|", PAGE, re.MULTILINE)
    assert len(rows) == 9
    for call, words in rows:
        layout = eval(call, {"Layout": Layout, "n": 16})
        stated = re.search(r"`(\[.*?\])`", words)
        if stated is not None:
            assert stated[1].replace(" n,", " 16,") in layout.spell_shape()
