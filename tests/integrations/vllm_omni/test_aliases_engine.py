"""Published names beside an engine that is installed, each scenario in an interpreter of its own."""

from __future__ import annotations


def test_installing_beside_an_engine_is_refused_and_touches_nothing(run_program, engine):
    run_program(
        """
        modules, finders = dict(sys.modules), list(sys.meta_path)
        assert "install(replace=True)" in error_of(install)
        assert sys.modules == modules and sys.meta_path == finders and not is_installed()
        import vllm_omni.diffusion.request as request
        assert request.WHOSE == "engine"
        """,
        path=engine,
    )


def test_replace_takes_the_manager_and_leaves_the_engine_its_groups_requests_and_connectors(run_program, engine):
    run_program(
        """
        install(replace=True)
        manager = importlib.import_module(MANAGER)
        assert manager.__name__ == TABLE[MANAGER]
        import vllm_omni.distributed.omni_connectors as parent
        assert parent.kv_transfer_manager is manager
        for name in (
            "vllm_omni.distributed.omni_connectors.factory",
            "vllm_omni.distributed.omni_connectors.utils.kv_utils",
            "vllm_omni.diffusion.request",
            "vllm_omni.diffusion.distributed.parallel_state",
        ):
            assert importlib.import_module(name).WHOSE == "engine", name
        assert importlib.import_module("vllm.distributed.parallel_state").WHOSE == "vllm"
        try:
            # A name of the table that this engine does not have is not made up for it.
            importlib.import_module("vllm_omni.distributed.omni_connectors.utils.initialization")
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("a module of the engine's was replaced")
        """,
        path=engine,
    )


def test_a_runner_imported_after_replacing_makes_our_manager_and_the_engines_own_after_uninstalling(
    run_program, engine
):
    run_program(
        """
        import types
        install(replace=True)
        import vllm_omni.runner as runner
        assert type(runner.make_manager(types.SimpleNamespace())).__module__ == TABLE[MANAGER]
        uninstall()
        import vllm_omni.distributed.omni_connectors as parent
        assert MANAGER not in sys.modules and not hasattr(parent, "kv_transfer_manager")
        assert importlib.import_module(MANAGER).WHOSE == "engine"
        """,
        path=engine,
    )


def test_a_manager_that_is_imported_already_is_not_replaced_unasked(run_program, engine):
    run_program(
        """
        theirs, finders = importlib.import_module(MANAGER), list(sys.meta_path)
        for replace in (False, True):
            assert "rebind()" in error_of(install, replace=replace)
        assert sys.modules[MANAGER] is theirs and sys.meta_path == finders and not is_installed()
        """,
        path=engine,
    )


def test_rebind_reaches_runners_that_hold_the_engines_class_and_uninstall_gives_everything_back(run_program, engine):
    run_program(
        """
        import types
        import vllm_omni.runner as runner
        theirs, imported = sys.modules[MANAGER], runner.OmniKVTransferManager
        class_before, modules, finders = dict(vars(imported)), engine_modules(), list(sys.meta_path)
        import vllm_omni.distributed.omni_connectors as parent

        rebind()
        rebind()
        ours = sys.modules[MANAGER]
        assert ours.__name__ == TABLE[MANAGER] and parent.kv_transfer_manager is ours and is_installed()
        assert runner.OmniKVTransferManager is imported
        config = types.SimpleNamespace()
        for made in (runner.make_manager(config), imported.from_vllm_config(config, config)):
            assert type(made) is ours.OmniKVTransferManager

        uninstall()
        assert engine_modules() == modules and parent.kv_transfer_manager is theirs
        assert dict(vars(imported)) == class_before and sys.meta_path == finders
        assert runner.make_manager(config).made_by == "engine"
        """,
        path=engine,
    )


def test_rebind_where_nothing_is_imported_yet_replaces_like_install(run_program, engine):
    run_program(
        """
        rebind()
        assert importlib.import_module(MANAGER).__name__ == TABLE[MANAGER]
        uninstall()
        assert importlib.import_module(MANAGER).WHOSE == "engine"
        """,
        path=engine,
    )


def test_a_rebind_that_fails_halfway_takes_back_what_it_did(run_program, engine):
    run_program(
        """
        import types
        theirs, finders = importlib.import_module(MANAGER), list(sys.meta_path)
        import vllm_omni.distributed.omni_connectors as parent
        their_class = theirs.OmniKVTransferManager
        del theirs.OmniKVTransferManager
        assert "no class OmniKVTransferManager" in error_of(rebind)
        assert sys.modules[MANAGER] is theirs is parent.kv_transfer_manager
        assert sys.meta_path == finders and not is_installed()

        class Stubborn(type):
            def __setattr__(cls, name, value):
                if name == "from_vllm_config" and cls.armed:
                    type.__setattr__(cls, "armed", False)
                    raise TypeError("not this one")
                type.__setattr__(cls, name, value)

        stubborn = Stubborn("OmniKVTransferManager", (), {**vars(their_class), "armed": True})
        before = {name: vars(stubborn)[name] for name in ("from_od_config", "from_vllm_config")}
        theirs.OmniKVTransferManager = stubborn
        try:
            rebind()
        except TypeError:
            pass
        else:
            raise AssertionError("nothing failed")
        assert {name: vars(stubborn)[name] for name in before} == before
        assert sys.modules[MANAGER] is theirs is parent.kv_transfer_manager
        assert sys.meta_path == finders and not is_installed()
        """,
        path=engine,
    )
