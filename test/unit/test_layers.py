"""The house rules that a machine can check: import direction, where sglang may be imported, file length, style."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "granikv_sglang"
KERNELS = ROOT / "kernels" / "granikv_kernels"

RANK = {"core": 0, "config": 0, "pools": 1, "tree": 2, "plan": 3, "backends": 4, "plugin": 5, "server": 6}
ADAPTERS = {
    "pools/allocator.py",
    "tree/lean.py",
    "tree/radix.py",
    "tree/audit.py",
    "backends/attention.py",
    "backends/cascade.py",
}
"""Thin adapters below plugin/ that may import sglang."""
GPU_FREE = ("core", "plan")


def modules():
    return sorted(p for p in PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rank_of(dotted: str) -> int | None:
    parts = dotted.split(".")
    return RANK.get(parts[1], 6) if len(parts) > 1 and parts[0] == "granikv_sglang" else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    relative = path.relative_to(PACKAGE)
    own = (
        RANK.get(relative.parts[0].removesuffix(".py"), 6)
        if relative.name != "__init__.py" or len(relative.parts) > 1
        else 0
    )
    for name in imports(path):
        rank = rank_of(name)
        assert rank is None or rank <= own or name in ("granikv_sglang.__version__",), f"{relative} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sglang_is_imported_in_seams_and_adapters_only(path):
    relative = str(path.relative_to(PACKAGE))
    uses = any(name.split(".")[0] == "sglang" for name in imports(path))
    allowed = RANK.get(relative.split("/")[0], 6) >= RANK["plugin"] or relative in ADAPTERS
    assert allowed or not uses, f"{relative} imports sglang"


@pytest.mark.parametrize("package", GPU_FREE)
def test_pure_packages_do_not_import_torch(package):
    for path in (PACKAGE / package).rglob("*.py"):
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_backends_do_not_see_the_tree():
    for path in (PACKAGE / "backends").rglob("*.py"):
        assert not any(name.startswith("granikv_sglang.tree") for name in imports(path)), path


def test_kernels_are_a_leaf():
    allowed = {"torch", "triton", "numpy", "granikv_kernels"} | sys.stdlib_module_names
    for path in KERNELS.rglob("*.py"):
        outside = {name.split(".")[0] for name in imports(path)} - allowed
        assert not outside, f"{path.relative_to(KERNELS)} imports {outside}"


@pytest.mark.parametrize("root", ["python", "kernels", "test", "benchmark"])
def test_files_are_short(root):
    for path in (ROOT / root).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 420, f"{path.relative_to(ROOT)} is too long to read"


def test_nothing_probes_with_hasattr():
    for root in ("python", "kernels"):
        for path in (ROOT / root).rglob("*.py"):
            assert "has" + "attr(" not in path.read_text(), path.relative_to(ROOT)
