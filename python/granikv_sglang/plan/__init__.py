"""Host planning of a forward pass: prefix forest, groups, regime. Runs without torch and without a GPU."""

from granikv_sglang.plan.base import Capacity, Decision, Item, Path, Plan, uniform_plan
from granikv_sglang.plan.classify import Classifier, Limits, Standing
from granikv_sglang.plan.cost import Constants, analytic
from granikv_sglang.plan.extend import ColdPart, Level, cold_part, levels_of, query_tiles, token_offsets
from granikv_sglang.plan.features import Features, Shape
from granikv_sglang.plan.forest import build_items, coverage_of
from granikv_sglang.plan.planner import Planner
from granikv_sglang.plan.work import Kind, Machine

__all__ = [
    "Capacity",
    "Classifier",
    "ColdPart",
    "Constants",
    "Decision",
    "Features",
    "Item",
    "Kind",
    "Level",
    "Limits",
    "Machine",
    "Path",
    "Plan",
    "Planner",
    "Shape",
    "Standing",
    "analytic",
    "build_items",
    "cold_part",
    "coverage_of",
    "levels_of",
    "query_tiles",
    "token_offsets",
    "uniform_plan",
]
