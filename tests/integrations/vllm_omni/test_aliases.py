"""Published names where no engine is installed, each scenario in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnikv.integrations.vllm_omni.aliases import TABLE


def test_importing_the_package_offers_no_name_and_loads_no_torch(run_program):
    run_program(
        """
        assert not is_installed() and engine_modules() == {}
        assert "torch" not in sys.modules and "msgspec" not in sys.modules
        try:
            import vllm_omni
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("an engine came from nowhere")
        """
    )


@pytest.mark.parametrize("alias", sorted(TABLE))
def test_a_published_name_leads_to_the_very_module_of_ours(run_program, alias):
    run_program(
        f"""
        alias, own_name = {alias!r}, TABLE[{alias!r}]
        install()
        offered = importlib.import_module(alias)
        ours = importlib.import_module(own_name)
        assert offered is ours is sys.modules[alias]
        assert ours.__name__ == own_name
        assert ours.__spec__.name == own_name and ours.__spec__.origin == ours.__file__
        assert ours.__loader__ is ours.__spec__.loader and ours.__package__ == own_name.rpartition(".")[0]
        assert importlib.reload(ours) is offered
        """
    )


def test_every_form_of_import_works(run_program):
    run_program(
        """
        install()
        import vllm_omni.diffusion.request
        import vllm_omni.diffusion.request as by_alias
        from vllm_omni.diffusion import request as from_parent
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        assert vllm_omni.diffusion.request is by_alias is from_parent
        assert OmniDiffusionRequest is by_alias.OmniDiffusionRequest
        assert importlib.util.find_spec("vllm.distributed.parallel_state") is not None
        """
    )


def test_names_of_an_engine_that_are_not_in_the_table_stay_missing(run_program):
    run_program(
        """
        install()
        for name in ("vllm_omni.platforms", "vllm.config", "vllm_omni.distributed.omni_connectors.nothing"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name == name
            else:
                raise AssertionError(f"{name} came from nowhere")
        """
    )


def test_patching_a_published_name_patches_the_global_that_our_code_reads(run_program):
    run_program(
        """
        from unittest.mock import patch
        install()
        from omnikv.integrations.vllm_omni import diffusion_parallel_state, vllm_parallel_state
        from omnikv.errors import LocalProtocolError
        with patch("vllm_omni.diffusion.distributed.parallel_state.get_world_group", return_value="patched"):
            assert diffusion_parallel_state.get_world_group() == "patched"
            # The other engine's module has a function of the same name, and must not be touched.
            try:
                vllm_parallel_state.get_world_group()
            except LocalProtocolError:
                pass
            else:
                raise AssertionError("one patch reached two modules")
        """
    )


def test_uninstall_leaves_modules_and_finders_as_they_were(run_program):
    run_program(
        """
        for own_name in TABLE.values():
            importlib.import_module(own_name)
        modules, finders, the_list = dict(sys.modules), list(sys.meta_path), sys.meta_path
        install()
        assert engine_modules() == {} and len(sys.meta_path) == len(finders) + 1
        for alias in TABLE:
            importlib.import_module(alias)
        assert set(TABLE) < set(engine_modules())
        uninstall()
        assert sys.modules == modules
        assert sys.meta_path == finders and sys.meta_path is the_list
        assert not is_installed()
        """
    )


def test_install_and_uninstall_may_be_repeated_in_any_order(run_program):
    run_program(
        """
        finders = list(sys.meta_path)
        uninstall()
        for turn in range(3):
            install()
            install(replace=True)
            rebind()
            assert is_installed() and len(sys.meta_path) == len(finders) + 1
            import vllm_omni.diffusion.request
            uninstall()
            uninstall()
            assert sys.meta_path == finders and engine_modules() == {}
        """
    )


def test_a_real_vllm_without_the_engine_is_never_shadowed(run_program, vllm_alone):
    run_program(
        """
        install()
        import vllm.distributed.parallel_state as real
        assert real.WHOSE == "vllm"
        import vllm_omni.diffusion.distributed.parallel_state as stand_in
        assert stand_in.__name__ == TABLE["vllm_omni.diffusion.distributed.parallel_state"]
        uninstall()
        assert set(engine_modules()) == {"vllm", "vllm.distributed", "vllm.distributed.parallel_state"}
        """,
        path=vllm_alone,
    )


def test_a_folder_that_merely_bears_the_engines_name_is_no_engine(run_program, write_files):
    root = write_files({"vllm_omni/README.txt": "not a package"})
    run_program(
        """
        install()
        import vllm_omni.diffusion.request as request
        assert request.__name__ == TABLE["vllm_omni.diffusion.request"]
        """,
        path=root,
    )


def test_an_engine_without_init_files_is_an_engine(run_program, write_files):
    root = write_files({"vllm_omni/distributed/omni_connectors/kv_transfer_manager.py": "WHOSE = 'engine'\n"})
    run_program("""assert "replace=True" in error_of(install)""", path=root)


def test_threads_that_install_and_uninstall_at_once_leave_one_finder_or_none(run_program):
    run_program(
        """
        from concurrent.futures import ThreadPoolExecutor
        finders = list(sys.meta_path)

        def come_and_go(turn):
            install()
            uninstall()

        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(come_and_go, range(400)))
            assert not is_installed() and sys.meta_path == finders
            list(pool.map(lambda turn: install(), range(400)))
            assert is_installed() and len(sys.meta_path) == len(finders) + 1
            modules = set(pool.map(lambda turn: importlib.import_module("vllm_omni.diffusion.request"), range(400)))
        assert modules == {sys.modules[TABLE["vllm_omni.diffusion.request"]]}
        uninstall()
        assert sys.meta_path == finders and engine_modules() == {}
        """
    )


def test_an_import_that_was_under_way_at_uninstall_fails_and_leaves_nothing(run_program):
    run_program(
        """
        install()
        finder = sys.meta_path[0]
        spec = finder.find_spec("vllm_omni")
        uninstall()
        sys.meta_path.insert(0, type("Late", (), {"find_spec": staticmethod(lambda name, path, target=None: spec)}))
        try:
            import vllm_omni
        except ImportError as error:
            assert "taken away" in str(error), error
        else:
            raise AssertionError("the import went through")
        assert engine_modules() == {}
        """
    )


def test_a_plain_interpreter_knows_none_of_this():
    done = subprocess.run(
        [sys.executable, "-c", "import omnikv, sys; assert not [n for n in sys.modules if n.startswith('vllm')]"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
