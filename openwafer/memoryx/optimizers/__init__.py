"""The update rules. Each changes one fp32 weight and its state in place; start at `rule.py`.

Elements are computed by operations that round once each, or by torch's fused kernels, and sums are taken in a
fixed order, so that neither threads nor tiers change a bit.
"""
