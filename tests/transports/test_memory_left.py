"""What a process may still take is the least that any limit leaves: read from the system, or from made-up files."""

import os
import resource
import secrets
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnikv.transports.memory_left import memory_bounds, tightest_bound

MIB = 1 << 20
GIB = 1 << 30


class System:
    """A root directory with the files that the kernel would show."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 1000000000 kB\n")
        self.write("proc/self/statm", "100 1 1 1 0 1 0")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path, limit, used, cached=0, version=2):
        names = ("memory.max", "memory.current", "") if version == 2 else _VERSION_1
        self.write(f"{path}/{names[0]}", f"{limit}\n")
        self.write(f"{path}/{names[1]}", f"{used}\n")
        self.write(f"{path}/memory.stat", f"anon 5\n{names[2]}inactive_file {cached}\n{names[2]}active_file 0\n")

    def unified(self, own, *, top="/"):
        self.write("proc/self/cgroup", f"0::{own}\n")
        self.write("proc/self/mountinfo", f"35 24 0:30 {top} /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n")

    def groups_found(self):
        return {bound.name.split()[3].removeprefix(str(self.root)): bound for bound in self.bounds("group")}

    def bounds(self, word=""):
        return [bound for bound in memory_bounds(self.root) if word in bound.name]


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def test_the_limit_of_any_group_above_counts(system):
    system.unified("/pod/container")
    system.group("sys/fs/cgroup/pod", 300 * MIB, 100 * MIB)
    system.group("sys/fs/cgroup/pod/container", "max", 90 * MIB)
    bound = tightest_bound(system.root)
    assert bound.limit_nbytes == 300 * MIB
    assert 190 * MIB < bound.left_nbytes < 200 * MIB
    assert "/sys/fs/cgroup/pod (memory.max)" in bound.name
    assert str(bound) == f"{bound.left_nbytes} of {300 * MIB} bytes are left of {bound.name}"


def test_page_cache_counts_as_left(system):
    system.unified("/")
    system.group("sys/fs/cgroup", 300 * MIB, 290 * MIB, cached=200 * MIB)
    assert 200 * MIB < tightest_bound(system.root).left_nbytes < 210 * MIB


def test_a_group_that_uses_all_leaves_nothing(system):
    system.unified("/")
    system.group("sys/fs/cgroup", 300 * MIB, 310 * MIB)
    assert tightest_bound(system.root).left_nbytes == 0


def test_the_first_version_is_read_where_the_memory_controller_is_there(system):
    system.write("proc/self/cgroup", "9:name=systemd:/\n4:memory,hugetlb:/a/b\n1:cpu:/c\n0::/\n")
    system.write(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    system.group("sys/fs/cgroup/memory", 9223372036854771712, 9 * MIB, version=1)
    system.group("sys/fs/cgroup/memory/a", 500 * MIB, 100 * MIB, cached=50 * MIB, version=1)
    system.group("sys/fs/cgroup/memory/a/b", 600 * MIB, 100 * MIB, version=1)
    assert list(system.groups_found()) == ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory/a"]
    assert 440 * MIB < tightest_bound(system.root).left_nbytes < 450 * MIB


@pytest.mark.parametrize(
    ("own", "top", "found"),
    [
        ("/docker/abc", "/docker/abc", ["/sys/fs/cgroup"]),
        ("/docker/abc/inner", "/docker/abc", ["/sys/fs/cgroup/inner", "/sys/fs/cgroup"]),
        ("/elsewhere", "/docker/abc", ["/sys/fs/cgroup"]),
        ("/../sibling", "/", ["/sys/fs/cgroup"]),
    ],
)
def test_a_container_sees_a_part_of_the_tree(system, own, top, found):
    system.unified(own, top=top)
    system.group("sys/fs/cgroup", 300 * MIB, 0)
    system.group("sys/fs/cgroup/inner", 400 * MIB, 0)
    assert list(system.groups_found()) == found


def test_a_mount_point_with_a_space_is_found(system):
    system.unified("/")
    text = (system.root / "proc/self/mountinfo").read_text().replace("/sys/fs/cgroup", "/my\\040groups")
    system.write("proc/self/mountinfo", text)
    system.group("my groups", 300 * MIB, 0)
    assert tightest_bound(system.root).limit_nbytes == 300 * MIB


def test_a_system_that_tells_nothing_is_bounded_by_the_machine(tmp_path):
    machine = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    (bound,) = (bound for bound in memory_bounds(tmp_path) if "machine" in bound.name)
    assert bound.limit_nbytes == machine
    assert 0 < bound.left_nbytes < machine


PROGRAM = """
import resource, sys
from pathlib import Path
limit, group, wanted = (int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
if group:
    (Path(group) / "cgroup.procs").write_text("0")
from omnikv.errors import ConfigError, PutRejected
from omnikv.transports.memory_left import tightest_bound
from omnikv.transports.shm_pool import Pool
try:
    Pool(wanted, 1 << 20)
except ConfigError as error:
    print(error)
# A little less, since what is left is read again, and may be less by then.
pool = Pool(min(wanted, tightest_bound().left_nbytes - (1 << 20)), 1 << 20)
ballast = bytearray(b"x") * (48 << 20)
taken = 0
try:
    while taken < wanted:
        taken += pool.take(8 << 20).nbytes
except PutRejected as error:
    print(error)
print(taken)
"""


def run(*, limit=0, group="", wanted, prefix=()):
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PROGRAM, str(limit), str(group), str(wanted)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


def test_a_pool_within_an_address_space_limit_ends_with_an_error_and_not_with_the_process():
    at_start, at_growth, taken = run(limit=GIB, wanted=GIB)
    for message in (at_start, at_growth):
        assert f"of {GIB} bytes are left of the address space limit (ulimit -v)" in message
    assert 32 * MIB < int(taken) < GIB


@contextmanager
def control_group(limit):
    """A group of this test's own below this process's, with a memory limit; skips where the system allows none."""
    memory = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    own = Path("/sys/fs/cgroup/memory" + memory.split(":", 2)[2] if memory else "/sys/fs/cgroup")
    group = own / f"omnikv-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if memory else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def test_a_pool_in_a_small_control_group_ends_with_an_error_and_not_with_the_process():
    with control_group(256 * MIB) as group:
        at_start, at_growth, taken = run(group=group, wanted=GIB)
    for message in (at_start, at_growth):
        assert f"of {256 * MIB} bytes are left of the control group {group}" in message
    assert 32 * MIB < int(taken) < 256 * MIB


def test_a_small_dev_shm_does_not_bound_a_pool():
    try:
        subprocess.run(["unshare", "-rm", "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace can be made here: {error}")
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    (taken,) = run(wanted=64 * MIB, prefix=("unshare", "-rm", "sh", "-c", mount, "sh"))
    assert int(taken) == 64 * MIB
