"""Host planning of a forward pass: prefix forest, groups, regime. Runs without torch and without a GPU."""

from granikv_sglang.plan.base import Capacity, Decision, Item, Path, Plan, uniform_plan
from granikv_sglang.plan.classify import CPU_THRESHOLDS, CUDA_THRESHOLDS, Features, StaticClassifier, Thresholds
from granikv_sglang.plan.extend import ColdPart, Level, cold_part, levels_of, query_tiles, token_offsets
from granikv_sglang.plan.forest import build_items, coverage_of
from granikv_sglang.plan.planner import Planner

__all__ = [
    "CPU_THRESHOLDS",
    "CUDA_THRESHOLDS",
    "Capacity",
    "ColdPart",
    "Decision",
    "Features",
    "Item",
    "Level",
    "Path",
    "Plan",
    "Planner",
    "StaticClassifier",
    "Thresholds",
    "build_items",
    "cold_part",
    "coverage_of",
    "levels_of",
    "query_tiles",
    "token_offsets",
    "uniform_plan",
]
