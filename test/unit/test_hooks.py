"""The recorder: signatures checked before, presence proved afterwards, every failure names its hook."""

import sys
import types

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from granikv_sglang.core import GraniKVError
from granikv_sglang.plugin.front import FRONT_TABLE, Front
from granikv_sglang.plugin.hooks import TABLE, Hook, Recorder
from granikv_sglang.plugin.runtime import Runtime

MODULE = "granikv_fake_upstream"


@pytest.fixture
def upstream(monkeypatch):
    """A stand-in for SGLang with one function and one class, and an empty hook registry."""
    module = types.ModuleType(MODULE)
    exec(
        "def add(a, b):\n    return a + b\n\nclass Thing:\n    def double(self, x):\n        return 2 * x\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return module


class Owner:
    def around(self, original, *args):
        return 100 + original(*args)


def row(target, parameters, handler="around"):
    return Hook(f"{MODULE}.{target}", HookType.AROUND, handler, parameters, "why", "until")


def test_hooks_land_and_act(upstream):
    recorder = Recorder(Owner(), [row("add", ("a", "b")), row("Thing.double", ("self", "x"))])
    recorder.register()
    HookRegistry.apply_hooks()
    assert upstream.add(1, 2) == 103
    assert upstream.Thing().double(4) == 108
    assert all(status.landed for status in recorder.statuses())
    recorder.require_landed()


@pytest.mark.parametrize(
    ("target", "parameters", "problem"),
    [
        ("add", ("a", "c"), "parameters are (a, b), expected (a, c)"),
        ("missing", ("a",), "no such target"),
        ("Thing.missing", ("self",), "no such target"),
    ],
)
def test_a_changed_upstream_is_refused_by_name(upstream, target, parameters, problem):
    recorder = Recorder(Owner(), [row(target, parameters)])
    recorder.register()
    HookRegistry.apply_hooks()
    with pytest.raises(GraniKVError) as caught:
        recorder.require_landed()
    assert f"{MODULE}.{target}" in str(caught.value)
    assert problem in str(caught.value)
    assert "refuses to serve" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registered_but_not_applied_is_refused(upstream):
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])
    recorder.register()
    with pytest.raises(GraniKVError, match=r"add is not in place"):
        recorder.require_landed()


def test_a_target_replaced_after_us_is_noticed(upstream):
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])
    recorder.register()
    HookRegistry.apply_hooks()
    upstream.add = lambda a, b: 0
    with pytest.raises(GraniKVError, match="replaced"):
        recorder.require_landed()


def test_another_plugin_wrapping_the_same_target_is_tolerated(upstream):
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])
    recorder.register()
    HookRegistry.register(f"{MODULE}.add", lambda original, *a: original(*a) * 2, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert upstream.add(1, 2) in (206, 106)
    recorder.require_landed()


@pytest.mark.parametrize("theirs_first", [True, False])
def test_another_plugin_that_replaces_the_same_target_is_wrapped_by_ours(upstream, theirs_first):
    """SGLang puts a replacement innermost whoever registers first, so ours still runs around it."""
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])

    def replace() -> None:
        HookRegistry.register(f"{MODULE}.add", lambda a, b: 7, HookType.REPLACE)

    if theirs_first:
        replace()
    recorder.register()
    if not theirs_first:
        replace()
    HookRegistry.apply_hooks()
    assert upstream.add(1, 2) == 107
    recorder.require_landed()


def test_another_plugin_that_has_changed_the_signature_before_us_is_refused(upstream):
    """It was applied first, and its function takes something else: ours would be called wrongly."""
    HookRegistry.register(f"{MODULE}.add", lambda a, b, c: 0, HookType.REPLACE)
    HookRegistry.apply_hooks()
    upstream.add = lambda a, b, c: 0
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])
    recorder.register()
    with pytest.raises(GraniKVError, match=r"parameters are \(a, b, c\), expected \(a, b\)"):
        recorder.require_landed()


def test_never_registered_is_refused(upstream):
    with pytest.raises(GraniKVError, match="never registered"):
        Recorder(Owner(), [row("add", ("a", "b"))]).require_landed()


def test_two_rows_on_one_target_and_a_second_registration_are_refused(upstream):
    with pytest.raises(GraniKVError, match="two hooks on one target"):
        Recorder(Owner(), [row("add", ("a", "b")), row("add", ("a", "b"))])
    recorder = Recorder(Owner(), [row("add", ("a", "b"))])
    recorder.register()
    with pytest.raises(GraniKVError, match="registered already"):
        recorder.register()


def test_a_class_is_replaced_by_a_subclass_and_checked_by_its_fields(upstream):
    class Base:
        usage: int = 0

    upstream.Answer = Base

    class Owner:
        class Better(Base):
            pass

    def named(field):
        return Recorder(Owner(), [Hook(f"{MODULE}.Answer", HookType.REPLACE, "Better", (field,), "why", "until")])

    with_gone = named("gone")
    with_gone.register()
    with pytest.raises(GraniKVError, match="no field gone"):
        with_gone.require_landed()
    recorder = named("usage")
    recorder.register()
    with pytest.raises(GraniKVError, match="not in place"):
        recorder.require_landed()
    HookRegistry.apply_hooks()
    assert upstream.Answer is Owner.Better
    recorder.require_landed()


@pytest.mark.parametrize(("table", "owner"), [(TABLE, Runtime), (FRONT_TABLE, Front)], ids=["scheduler", "http"])
def test_every_row_of_a_table_matches_the_installed_sglang(table, owner):
    for hook in table:
        assert Recorder._signature_problem(hook) == ""
        assert callable(getattr(owner, hook.handler))
        assert hook.why.endswith(".")
        assert hook.until.endswith(".")
