"""The radix tree with HOT spans, the promotion policy, and the audit. Adapters are imported from their modules."""

from granikv_sglang.tree.policy import NodeView, Segment, choose_segment

__all__ = ["NodeView", "Segment", "choose_segment"]
