"""No module that speaks to a peer can load a pickle: the code of the transports names nothing that could."""

import ast
from pathlib import Path

import pytest

import omnikv

ROOT = Path(omnikv.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
MODULES = sorted([*(ROOT / "transports").glob("*.py"), *(ROOT / "core").glob("*.py"), *(ROOT / "tensors").glob("*.py")])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_d29_no_module_on_the_way_of_a_payload_loads_code(path):
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    attributes = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not imported & FORBIDDEN
    assert not called & {"eval", "exec", "compile", "__import__"}
    assert "torch.load" not in attributes
