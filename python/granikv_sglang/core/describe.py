"""What a code means, in the words that stand below it in the source: one text for docs, page and reports."""

from __future__ import annotations

import ast
import inspect
from enum import StrEnum


def descriptions(cls: type[StrEnum]) -> dict[str, str]:
    """The string below each member of an enum, by the member's value; a member without one is left out."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for member, text in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(member, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        target = member.targets[0]
        assert isinstance(target, ast.Name)
        found[cls[target.id].value] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found
