"""docs/errors.md names every error once and says of each what the class says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from omnikv import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| .* \| (yes|no) \| (yes|no) \| .+ \|$", re.MULTILINE)


def test_the_table_is_the_error_tree():
    stated = {name: row for name, *row in ROW.findall(PAGE.read_text())}
    classes = {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.OmniKVError) and value is not errors.OmniKVError
    }
    assert set(stated) == set(classes)
    for name, (built_in, consumed, retryable) in stated.items():
        kind = classes[name]
        foreign = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]
        assert foreign[0] == (built_in or "Exception"), name
        assert (consumed == "yes", retryable == "yes") == (kind.consumed, kind.retryable), name
