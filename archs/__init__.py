"""Shapes, their exact accounting, one backbone and the residual topologies. Counts import without torch."""
